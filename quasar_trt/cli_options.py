"""Options of the command line: defaults from dataclasses, names from registries, errors in one line."""

from __future__ import annotations

import dataclasses
import difflib
import functools

import click

from quasar_trt.cli_types import Bytes, OptionPair, Real, RegistryName, TokenBias, Whole, called
from quasar_trt.errors import unknown
from quasar_trt.sampling_params import SamplingParams


class Group(click.Group):
    """Commands in the order of use; an unknown one is a QuasarError naming the nearest."""

    def list_commands(self, ctx):
        return list(self.commands)

    def resolve_command(self, ctx, args):
        if self.get_command(ctx, click.utils.make_str(args[0])) is None and not args[0].startswith("-"):
            raise unknown("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


class DefaultGroup(Group):
    """A group whose first command is meant where options come without a command."""

    def parse_args(self, ctx, args):
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def field_option(owner: type, name: str, text: str, flag: bool = False, **attributes):
    """A click option for one field of an options dataclass, with the field's default."""
    spelling = f"--{name.replace('_', '-')}"
    default = {field.name: field.default for field in dataclasses.fields(owner)}[name]
    if flag:
        return click.option(spelling, is_flag=True, default=default, help=text, **attributes)
    return click.option(spelling, default=default, show_default=default is not None, help=text, **attributes)


# field of SamplingParams -> (help, attributes of its option); none has a default here, so that the model's own can stand
_SAMPLING = {
    "n": ("Completions of each prompt.", {"type": Whole()}),
    "max_tokens": ("Most tokens to emit.", {"type": Whole()}),
    "min_tokens": ("Tokens to emit before anything else may end the text.", {"type": Whole()}),
    "temperature": ("0 is greedy.", {"type": Real()}),
    "top_p": ("Keep the most probable tokens that reach this probability.", {"type": Real()}),
    "top_k": ("Keep this many most probable tokens; 0 keeps all.", {"type": Whole()}),
    "min_p": ("Keep tokens this many times as probable as the most probable.", {"type": Real()}),
    "repetition_penalty": ("Divides the logits of tokens of the prompt and the text.", {"type": Real()}),
    "presence_penalty": ("Subtracted from the logit of a token that was emitted.", {"type": Real()}),
    "frequency_penalty": ("Subtracted once for each time that it was emitted.", {"type": Real()}),
    "seed": ("Fixes the sampled tokens; drawn from the system by default.", {"type": Whole()}),
    "stop": ("End where this text appears; may be repeated.", {"multiple": True, "metavar": "TEXT"}),
    "stop_token_ids": ("End with this token; may be repeated.", {"type": Whole(), "multiple": True, "metavar": "ID"}),
    "bad_words": ("Never emit this text; may be repeated.", {"multiple": True, "metavar": "TEXT"}),
    "logit_bias": (
        "Add to a token's logit; may be repeated.",
        {"type": TokenBias(), "multiple": True, "metavar": "ID=BIAS"},
    ),
    "allowed_token_ids": (
        "Emit no token but this; may be repeated.",
        {"type": Whole(), "multiple": True, "metavar": "ID"},
    ),
    "ignore_eos": ("Go on past the end-of-sequence token.", {}),
    "skip_special_tokens": ("Leave special tokens out of the text; so by default.", {}),
    "include_stop_str_in_output": ("Keep the text of what ended it.", {}),
    "logprobs": ("Show each token with this many most probable ones.", {"type": Whole()}),
    "prompt_logprobs": ("Show so each token of the prompt.", {"type": Whole()}),
}


def sampling_options(*besides: str, defaults: SamplingParams):
    """The sampling parameters as options, but those named in `besides`. The command gets what was given as `sampling`."""
    names = [name for name in _SAMPLING if name not in besides]

    def decorate(command):
        @functools.wraps(command)
        def collected(**options):
            given = {name: options.pop(name) for name in names}
            given = {name: value for name, value in given.items() if value not in (None, ())}
            if "logit_bias" in given:
                given["logit_bias"] = dict(given["logit_bias"])
            return command(sampling=given, **options)

        for name in reversed(names):
            text, attributes = _SAMPLING[name]
            spelling, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
            if isinstance(default, bool):
                attributes = {"is_flag": True}
                spelling += f"/--no{spelling[1:]}" if default else ""
            elif isinstance(default, int | float):
                text = f"{text} [default: {default}]"
            collected = click.option(spelling, default=None, help=text, **attributes)(collected)
        return collected

    return decorate


def drafter_options(*besides: str):
    """--drafter and --drafter-option, for a command that drafts; `besides` are allowed with the registry's names."""

    def names() -> list[str]:
        from quasar_trt.drafters.registry import drafter_names

        return [*drafter_names(), *besides]

    def check(ctx, param, value):
        from quasar_trt.drafters.registry import check_drafter_name

        if value not in besides:
            check_drafter_name(value, besides)
        return value

    def decorate(command):
        command = click.option(
            "--drafter-option",
            type=OptionPair(),
            multiple=True,
            metavar="KEY=VALUE",
            help="An option of the drafter; may be repeated.",
        )(command)
        return click.option(
            "--drafter",
            type=RegistryName(names),
            callback=check,
            default="suffix",
            show_default=True,
            help="Who proposes tokens.",
        )(command)

    return decorate


def _engine_names() -> list[str]:
    from quasar_trt.engines import ENGINES

    return ["auto", *ENGINES]


ENGINE = click.option(
    "--engine", type=RegistryName(_engine_names), default="auto", show_default=True, help="What runs the verifier."
)
KV_CACHE = click.option(
    "--kv-cache-memory-bytes",
    type=Bytes(),
    help="Most memory for keys and values, as 2G; half of what is available by default.",
)
THREADS = click.option("--threads", type=Whole(least=1), help="Threads of the engine; all usable CPUs by default.")


def usage_message(error: click.UsageError) -> str:
    """click's message as one line in the manner of QuasarError."""
    where = f"{error.ctx.command_path}: " if error.ctx else ""
    if isinstance(error, click.NoSuchOption):
        known = [
            name for param in error.ctx.command.get_params(error.ctx) for name in param.opts + param.secondary_opts
        ]
        near = difflib.get_close_matches(error.option_name.replace("_", "-"), known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"see {error.ctx.command_path} --help"
        if any(param.nargs == -1 for param in error.ctx.command.params):  # PROMPT...
            hint += "; put -- before a text that begins with '-'"
        return f"{where}unknown option '{error.option_name}'; {hint}"
    if isinstance(error, click.MissingParameter):
        message = f"{called(error.param)} is missing"
    else:
        message = " ".join(error.format_message().split()).removesuffix(".")
    return where + message + (f"; see {error.ctx.command_path} --help" if error.ctx else "")
