"""Parts of the check for machines with a GPU that need no engine: tests of the kernels, their times, the cost of a step."""

from __future__ import annotations

import re
import subprocess
import sys

from quasar_trt.bench.curve import CurveTimes, ratios
from quasar_trt.bench.curve import measure as measure_curves
from quasar_trt.bench.figures import spread
from quasar_trt.bench.gpu_part import Outcome, need_gpu
from quasar_trt.bench.kernel_report import KernelReport
from quasar_trt.bench.kernels import gpu_buffer
from quasar_trt.bench.options import KernelBenchOptions
from quasar_trt.bench.weight_buffer import KINDS, Layer, layer_of
from quasar_trt.model_config import ModelConfig
from quasar_trt.tables import FigureTable

KERNEL_TESTS = ("tests/plugins/test_operations.py", "tests/plugins/test_triton_ops.py")
QWEN3_8B = ModelConfig("Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, 128, 151936, 40960, 1e-6, 1e6)


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


def step_cost() -> Outcome:
    """What the linears of a step cost by its rows, with INT8 and with BF16 weights of the shape of Qwen3-8B."""
    need_gpu()
    return linears_outcome(layer_of(QWEN3_8B), KernelBenchOptions())


def linears_outcome(layer: Layer, options: KernelBenchOptions) -> Outcome:
    """Every kind of linear of as many of these layers as the buffer holds."""
    buffer, reader, cache = gpu_buffer(layer)
    curves = [buffer.curve(kind, options.rows) for kind in KINDS]
    times = measure_curves(curves, buffer.read, buffer.nbytes, options.repeats)
    report = KernelReport(options, reader, cache, buffer.nbytes, layer, tuple(times), engines=())
    w8a8, w8a16, bf16 = (_seconds_per_layer(curve, layer) for curve in times)
    rows = [
        (str(count), spread(ratios(bf16[count], w8a8[count])), spread(ratios(bf16[count], w8a16[count])))
        for count in options.rows
    ]
    table = FigureTable("linears of a step, by layer", ("rows", "BF16 / W8A8\ntime", "BF16 / W8A16\ntime"), rows)
    return Outcome(report.to_dict(), [*report.tables(), table])


def _seconds_per_layer(curve: CurveTimes, layer: Layer) -> dict[int, list[float]]:
    weights = sum(n * k for k, n in layer.items())
    layers = curve.weight_bytes / weights / (2 if curve.name.startswith("bf16") else 1)
    return {rows: [each / layers for each in seconds] for rows, seconds in curve.seconds.items()}
