"""What only a machine with a GPU can check: `scripts/gpu_check.sh` runs it from a checkout.

Each part gives its figures or says why it cannot run here; one JSON file holds them all.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from quasar_trt.bench.gpu_engine_parts import EngineParts
from quasar_trt.bench.gpu_kernel_parts import kernel_tests, kernel_times, step_cost
from quasar_trt.bench.gpu_part import NotRun, Outcome
from quasar_trt.cli import fail
from quasar_trt.cli_output import check_outputs, save_json
from quasar_trt.errors import QuasarError
from quasar_trt.machine import describe_machine
from quasar_trt.tensorrt_llm_stack import LLM_TARGET

ENGINE_TARGETS = ("tensorrt-rtx", "tensorrt", LLM_TARGET)  # those that run on a GPU, named as their stacks


def parts_of(engines: EngineParts) -> dict[str, Callable[[], Outcome]]:
    parts = {
        "kernel tests": kernel_tests,
        "kernel times": kernel_times,
        "step cost": step_cost,
        "reference engine": engines.reference,
    }
    for target in ENGINE_TARGETS:
        parts[target] = partial(engines.target, target)
        parts[f"{target}, four cells"] = partial(engines.cells, target)
    return parts


def run_parts(parts: Mapping[str, Callable[[], Outcome]], console: Console) -> tuple[dict, bool]:
    """Runs and prints each part: ({part: {"figures", "failure"} or {"not_run": why}}, whether all ran without a failure)."""
    results, sound = {}, True
    for name, part in parts.items():
        try:
            outcome = part()
        except NotRun as reason:
            results[name], sound = {"not_run": str(reason)}, False
            console.print(f"{name}: not run, {reason}", highlight=False, markup=False)
            continue
        except Exception as error:  # the other parts still count, and machines with a GPU are dear
            outcome = Outcome({}, failure=f"{type(error).__name__}: {error}")
        for table in outcome.tables:
            console.print(table.terminal(), "")
        if outcome.failure:
            sound = False
            console.print(f"{name}: FAILED\n{outcome.failure}", highlight=False, markup=False)
        results[name] = {"figures": outcome.figures, "failure": outcome.failure}
    return results, sound


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.argument("model")
@click.argument("prompts", type=click.Path(path_type=Path))
def main(output: Path, model: str, prompts: Path) -> None:
    """Runs every part and saves OUTPUT, a JSON file. The exit code is 0 when all parts ran without a failure.

    Engines are built of MODEL, and answer what is in PROMPTS, JSON Lines.
    """
    try:
        check_outputs({"OUTPUT": output})
        with tempfile.TemporaryDirectory(prefix="quasar-trt-gpu-check-") as directory:
            results, sound = run_parts(parts_of(EngineParts(model, prompts, Path(directory))), Console())
        save_json(output, {"environment": describe_machine(), "parts": results})
    except QuasarError as error:
        fail(str(error))
    click.echo(f"saved {output}")
    sys.exit(not sound)


if __name__ == "__main__":
    main()
