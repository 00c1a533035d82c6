"""Options of the command line: defaults from dataclasses, names from registries, errors in one line."""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path

import click

from quasar_trt.errors import QuasarError, unknown

PATH = click.Path(path_type=Path)


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


class RowCounts(click.ParamType):
    """Numbers of rows, N,N,...; what takes them checks their range."""

    name = "n,n,..."

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(number) for number in value.split(","))
        except ValueError:
            raise QuasarError(f"{param.opts[0]} is '{value}'; allowed: numbers with commas between them") from None


def field_option(owner: type, name: str, text: str, flag: bool = False, **attributes):
    """A click option for one field of an options dataclass, with the field's default."""
    spelling = f"--{name.replace('_', '-')}"
    default = {field.name: field.default for field in dataclasses.fields(owner)}[name]
    if flag:
        return click.option(spelling, is_flag=True, default=default, help=text, **attributes)
    return click.option(spelling, default=default, show_default=default is not None, help=text, **attributes)


class OptionPair(click.ParamType):
    """KEY=VALUE; the value is read as JSON where it is JSON (numbers, true, lists), else kept as text."""

    name = "key=value"

    def convert(self, value, param, ctx):
        key, equals, text = value.partition("=")
        if not (key and equals):
            raise QuasarError(f"{param.opts[0]} is '{value}'; allowed: KEY=VALUE")
        try:
            return key.replace("-", "_"), json.loads(text)
        except ValueError:
            return key.replace("-", "_"), text


class RegistryName(click.ParamType):
    """A name out of a registry that is imported only when it is needed; what looks the name up reports a wrong one."""

    name = "name"

    def __init__(self, load_names):
        self.load_names = load_names

    def get_metavar(self, param, ctx=None):
        return f"[{'|'.join(self.load_names())}]"


def drafter_options(*besides: str):
    """--drafter and --drafter-option, for a command that drafts; `besides` are allowed with the registry's names."""

    def names() -> list[str]:
        from quasar_trt.drafters import DRAFTERS

        return [*DRAFTERS, *besides]

    def check(ctx, param, value):
        if value not in names():
            raise unknown("drafter", value, names())
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
THREADS = click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of the engine; all usable CPUs by default."
)


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
    return where + " ".join(error.format_message().split())
