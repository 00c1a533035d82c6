"""The command line: quasar-trt build | generate | chat | serve | bench | eval | info.

Only click and the light modules are imported here; each command imports what it needs when it runs, so `--help` is quick.
Options are accepted in both spellings, `--output-dir` and `--output_dir`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from quasar_trt import __version__
from quasar_trt.cli_bench import bench
from quasar_trt.cli_options import (
    ENGINE,
    KV_CACHE,
    THREADS,
    Group,
    drafter_options,
    field_option,
    sampling_options,
    usage_message,
)
from quasar_trt.cli_output import check_outputs, save_json
from quasar_trt.cli_serve import serve
from quasar_trt.cli_types import PATH, Choice, Numbers, Real, Whole
from quasar_trt.communicator import launched_size
from quasar_trt.errors import QuasarError
from quasar_trt.plan import PLAN_TARGETS
from quasar_trt.recipe import LM_HEADS, QUANTIZATIONS, ROUNDINGS, Recipe
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.tensorrt_llm_stack import LLM_TARGET

if TYPE_CHECKING:
    from quasar_trt.runner import Runner

CHAT = SamplingParams(max_tokens=None)  # an answer may be as long as the context holds


@click.group(
    cls=Group,
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.version_option(__version__, "--version", message="quasar-trt %(version)s")
def cli():
    """Speculative decoding whose verifier is a smoothed INT8 engine."""


@cli.command()
@click.argument("model")
@click.option("--output-dir", type=PATH, required=True, help="Engine directory to make.")
@click.option(
    "--target",
    type=Choice(["cpu", *PLAN_TARGETS, LLM_TARGET]),
    default="cpu",
    show_default=True,
    help="What the engine runs on.",
)
@click.option("--sm", type=Numbers(), default=(), help="GPUs to compile for, such as 80,89; for targets on GPUs.")
@field_option(Recipe, "quantization", "Weights: int8 (W8A8) or none (BF16).", type=Choice(QUANTIZATIONS))
@field_option(
    Recipe,
    "smoothquant",
    "One smoothing exponent for all, 0 to 1; searched per group by default.",
    type=Real(),
    metavar="ALPHA",
)
@click.option("--rotate/--no-rotate", default=None, help="Rotate the model; on where the smoothing is searched.")
@field_option(Recipe, "rounding", "Of weights; gptq with a rotation.", type=Choice(ROUNDINGS))
@field_option(Recipe, "activations", "Bits of a quantized linear's input, 8 or 16; 8 by default.", type=Whole())
@click.option(
    "--static-activations",
    is_flag=True,
    help="One scale for each linear's input, fixed by calibration; for targets on GPUs.",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Linears that stay in BF16; may be repeated.")
@field_option(Recipe, "lm_head", "The head; rescored: INT8, the best logits again in BF16.", type=Choice(LM_HEADS))
@click.option("--quantize-lm-head", is_flag=True, help="The same as --lm-head int8.")
@click.option(
    "--calib-dataset", type=PATH, metavar="FILE", help="Calibration text; without it the model writes its own."
)
@click.option("--calib-size", type=Whole(), help="Calibration samples; 16 by default.")
@click.option("--calib-max-seq-length", type=Whole(), help="Tokens per calibration sample; 256 by default.")
@click.option(
    "--seed", type=Whole(), default=0, show_default=True, help="Seed of the text that the model writes itself."
)
@click.option("--tp-size", type=Whole(), default=1, show_default=True, help="Ranks that the engine is for.")
@click.option("--max-batch-size", type=Whole(), default=16, show_default=True, help="Most requests per pass.")
@click.option("--max-seq-len", type=Whole(), help="Most tokens per sequence; the model's own limit by default.")
@click.option("--max-draft-len", type=Whole(), help="Most draft tokens per request and pass; 16 by default.")
@click.option("--trust-remote-code", is_flag=True, help="Run the tokenizer code that a checkpoint brings.")
@click.option("--dry-run", is_flag=True, help="Only check the model and say what the build would take.")
@click.option("--force", is_flag=True, help="Replace an existing output directory.")
def build(model, output_dir, **options):
    """Build a model into an engine directory.

    MODEL is a Hugging Face directory, a hub id or a GGUF file.
    """
    if options.pop("quantize_lm_head"):
        if options["lm_head"] not in (None, "int8"):
            raise QuasarError(f"quantize_lm_head means lm_head 'int8', but lm_head is '{options['lm_head']}'; give one")
        options["lm_head"] = "int8"

    from quasar_trt.builders.targets import target_recipe

    names = [field.name for field in dataclasses.fields(Recipe) if field.name in options]
    recipe = target_recipe(options["target"], **{name: options.pop(name) for name in names})

    from quasar_trt.builders.build import build as build_engine

    build_engine(model, output_dir, recipe, **options)


@cli.command()
@click.argument("engine_dir", type=PATH)
@click.argument("prompt", nargs=-1, required=True)
@click.option("--chat", is_flag=True, help="Put each prompt into the model's chat template.")
@drafter_options("none")
@sampling_options(defaults=SamplingParams())
@ENGINE
@THREADS
@KV_CACHE
@click.option("--stats/--no-stats", default=True, help="One line about acceptance and speed, on stderr.")
def generate(
    engine_dir, prompt, chat, drafter, drafter_option, engine, threads, kv_cache_memory_bytes, stats, sampling
):
    """Continue prompts, streaming to the terminal.

    Each PROMPT is continued in turn by the engine in ENGINE_DIR; '-' reads one from standard input.
    """
    from quasar_trt.continuation import Continuation
    from quasar_trt.generation_config import GenerationConfig
    from quasar_trt.metrics import stats_line

    model = GenerationConfig.read(engine_dir).sampling
    params = SamplingParams(**model | sampling)  # before anything is loaded
    runner = open_runner(engine_dir, drafter, drafter_option, engine, threads, kv_cache_memory_bytes)
    continuation = Continuation(runner, params)
    for text in prompt:
        request = standard_input() if text == "-" else text
        continuation.show(runner.chat_ids([{"role": "user", "content": request}]) if chat else request)
    if stats:
        note_defaults(model, sampling)
        click.echo(stats_line(runner.stats, continuation.clock.tokens_per_second), err=True)


@cli.command()
@click.argument("engine_dir", type=PATH)
@click.option("--system", metavar="TEXT", help="A system message before the conversation.")
@drafter_options("none")
@sampling_options("n", "logprobs", "prompt_logprobs", defaults=CHAT)
@ENGINE
@THREADS
@KV_CACHE
def chat(engine_dir, system, drafter, drafter_option, engine, threads, kv_cache_memory_bytes, sampling):
    """Talk with a model.

    Answers stream; the line below tells how drafting goes. /reset begins anew, /exit leaves, Ctrl-C stops an answer.
    An answer may be as long as the context holds, unless --max-tokens or the model says otherwise.
    """
    from rich.console import Console

    from quasar_trt.chat import Chat, converse
    from quasar_trt.generation_config import GenerationConfig

    model = GenerationConfig.read(engine_dir).sampling
    params = dataclasses.replace(CHAT, **model | sampling)  # before anything is loaded
    runner = open_runner(engine_dir, drafter, drafter_option, engine, threads, kv_cache_memory_bytes)
    if runner.tokenizer is None or not runner.tokenizer.chat_template:
        missing = "tokenizer" if runner.tokenizer is None else "chat template"
        raise QuasarError(
            f"{engine_dir} has no {missing}, which chat needs; quasar-trt generate continues plain prompts"
        )
    note_defaults(model, sampling)
    console = Console()
    converse(Chat(runner, params, system, console), console)


cli.add_command(serve)


def open_runner(engine_dir, drafter, drafter_option, engine, threads, kv_cache_memory_bytes) -> Runner:
    from quasar_trt.runner import Runner

    return Runner.from_dir(
        engine_dir,
        drafter=None if drafter == "none" else drafter,
        drafter_options=dict(drafter_option),
        engine=engine,
        threads=threads,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )


def note_defaults(model: dict[str, object], given: dict[str, object]) -> None:
    """Shows the sampling parameters that come from the model."""
    from quasar_trt.generation_config import sampling_text

    used = {name: value for name, value in model.items() if name not in given}
    if used:
        click.echo(f"note: the model's own sampling parameters: {sampling_text(used)}", err=True)


def standard_input() -> str:
    """All of it. Raises QuasarError when it is closed or is no text."""
    if sys.stdin is None:
        raise QuasarError("the prompt '-' reads standard input, which is closed; give it a file or a pipe")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise QuasarError(f"standard input is not {error.encoding} text; give the prompt in that encoding") from None


cli.add_command(bench)


@cli.group("eval", cls=Group, invoke_without_command=True)
@click.pass_context
def evaluate(context):
    """Measure a built engine."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@evaluate.command()
@click.argument("engine_dir", type=PATH)
@click.option("--against", metavar="MODEL", help="Compare with this model; by default with the engine's own source.")
@click.option("--text", type=PATH, metavar="FILE", help="UTF-8 text to measure on; by default the package's own.")
@click.option("--tokens", type=Whole(least=2), help="Use only the first N tokens of the text.")
@click.option("--window", type=Whole(least=2), help="Tokens per window; 512 by default, or the engine's limit.")
@click.option("--plot", type=PATH, metavar="FILE.png", help="Draw the error that each layer leaves.")
@click.option("--output", type=PATH, metavar="FILE", help="Save the report as JSON.")
@THREADS
def fidelity(engine_dir, plot, output, **options):
    """Measure how far an engine is from its source model.

    The engine in ENGINE_DIR and the source read the same text. ENGINE_DIR stays as it is.
    """
    outputs = {"--output": output, "--plot": plot}
    check_outputs(outputs)
    for option, path in outputs.items():
        if path and engine_dir.resolve() in path.resolve().parents:
            raise QuasarError(f"{option}: {path} lies in the engine directory, which stays as it is; choose another")

    from rich.console import Console

    from quasar_trt.builders.evaluate import evaluate_fidelity
    from quasar_trt.fidelity_report import read_fidelity, show
    from quasar_trt.manifest import Manifest

    calibration = Manifest.open(engine_dir).calibration
    built = read_fidelity(engine_dir / "fidelity.json")
    measured = evaluate_fidelity(engine_dir, **options)
    show(measured | {"groups": built.get("groups", {})}, Console(), calibration)
    if plot:
        from quasar_trt.builders.fidelity_plot import plot as draw

        draw(measured["layer_errors"], f"{engine_dir.name} against {Path(measured['source']).name}", plot)
    if output:
        save_json(output, measured)


@cli.command()
@click.argument("engine_dir", type=PATH, required=False)
@click.option("--verify", is_flag=True, help="Hash every weight file and compare with the manifest.")
@click.option("--kernels", is_flag=True, help="Compile the GPU kernels and show what they take on each GPU.")
def info(engine_dir, verify, kernels):
    """Describe an engine directory or this machine.

    Without ENGINE_DIR: what this machine can run.
    """
    if kernels and (engine_dir or verify):
        raise QuasarError("--kernels compiles kernels for any engine; give it alone")

    from rich.console import Console

    from quasar_trt.info import show_engine, show_machine, verify_engine
    from quasar_trt.manifest import Manifest

    console = Console()
    if kernels:
        from quasar_trt.kernel_resources import kernel_table

        console.print(kernel_table().terminal())
        return
    if engine_dir is None:
        if verify:
            raise QuasarError("--verify needs an ENGINE_DIR")
        show_machine(console)
        return
    manifest = Manifest.open(engine_dir)
    show_engine(engine_dir, manifest, console)
    if verify:
        verify_engine(engine_dir, manifest, console, Console(stderr=True))


def main() -> None:
    """The console script: a user's error is one line on stderr and exit code 1, Ctrl-C is exit code 130, SIGTERM 143, SIGHUP 129.

    Of several ranks rank 0 alone does what it says; the others follow.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):  # as exceptions, so that nothing half-written stays
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        if launched_size() > 1:
            from quasar_trt.ranks import lead

            lead()
        cli.main(sys.argv[1:] or ["--help"], prog_name="quasar-trt", standalone_mode=False)
    except QuasarError as error:
        fail(str(error))
    except click.UsageError as error:
        fail(usage_message(error))
    except OSError as error:
        discard_output()
        fail(f"{error.strerror}: {error.filename}" if error.filename else error.strerror or str(error))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


def discard_output() -> None:
    """What standard output still buffers may be what could not be written; at exit Python would try again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
