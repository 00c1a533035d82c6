"""What only a machine with a GPU can check: `scripts/gpu_check.sh` runs it from a checkout.

Each part gives its figures or says why it cannot run here; one JSON file holds them all.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console

from quasar_trt.cli import fail
from quasar_trt.cli_output import check_outputs, save_json
from quasar_trt.errors import QuasarError
from quasar_trt.machine import describe_machine
from quasar_trt.tables import FigureTable

KERNEL_TESTS = ("tests/plugins/test_operations.py", "tests/plugins/test_triton_ops.py")


class NotRun(Exception):
    """Why a part cannot run on this machine."""


@dataclass(frozen=True)
class Outcome:
    """figures: what JSON can hold. failure: what went wrong, "" when nothing did."""

    figures: dict
    tables: list[FigureTable] = field(default_factory=list)
    failure: str = ""


def need_gpu() -> None:
    """Raises NotRun without a CUDA device that torch can use, or without Triton."""
    import torch

    if not torch.cuda.is_available():
        raise NotRun(f"torch {torch.__version__} finds no CUDA device")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise NotRun(f"Triton cannot be imported ({error}); pip install 'quasar-trt[triton]'") from None


def kernel_tests() -> Outcome:
    """The tests of the operations, which take the GPU where there is one."""
    need_gpu()
    run = subprocess.run([sys.executable, "-m", "pytest", *KERNEL_TESTS], capture_output=True, text=True, check=False)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", run.stdout)}
    failure = "" if run.returncode == 0 else "\n".join(run.stdout.splitlines()[-20:])
    rows = [(word, str(count)) for word, count in counts.items()]
    return Outcome(counts, [FigureTable("kernel tests", ("outcome", "tests"), rows)], failure)


def kernel_times() -> Outcome:
    """Bandwidth of the kernels beside that of the memory."""
    need_gpu()
    from quasar_trt.bench.gpu_kernels import Sizes, measure, time_in_graph
    from quasar_trt.plugins import triton

    times = measure(triton, "cuda", time_in_graph, Sizes())
    return Outcome(times.to_dict(), times.tables())


PARTS: dict[str, Callable[[], Outcome]] = {"kernel tests": kernel_tests, "kernel times": kernel_times}


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
def main(output: Path) -> None:
    """Runs every part and saves OUTPUT, a JSON file. The exit code is 0 when all parts ran without a failure."""
    try:
        check_outputs({"OUTPUT": output})
    except QuasarError as error:
        fail(str(error))
    results, sound = run_parts(PARTS, Console())
    save_json(output, {"environment": describe_machine(), "parts": results})
    click.echo(f"saved {output}")
    sys.exit(not sound)


if __name__ == "__main__":
    main()
