"""Runs the benchmark of kernels: linears and engine passes, interleaved with reading memory at full speed.

Engines of plans are set against the memory of their GPU, others against that of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from quasar_trt.bench.curve import Curve, measure
from quasar_trt.bench.figures import count
from quasar_trt.bench.kernel_report import EngineTimes, KernelReport
from quasar_trt.bench.options import KernelBenchOptions
from quasar_trt.bench.progress import progress_bar
from quasar_trt.bench.scratch_sequence import ScratchSequence
from quasar_trt.bench.weight_buffer import KINDS, STANDARD_LAYER, Layer, WeightBuffer, layer_of
from quasar_trt.engines import open_engine
from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.machine import last_level_cache, usable_cpus
from quasar_trt.manifest import Manifest
from quasar_trt.plugins import native

if TYPE_CHECKING:
    from quasar_trt.bench.gpu_weight_buffer import GpuWeightBuffer

CONTEXT = 128
LONG_CONTEXT = 4096
# Of what a pass over the buffer reads, at most an eighth may still lie in a cache from the pass before.
_BUFFER_PER_CACHE = 8
_LEAST_BUFFER = 256 << 20
_LEAST_GPU_BUFFER = 1 << 30


def run_kernel_bench(
    engine_dirs: Sequence[Path], options: KernelBenchOptions, progress_console: Console
) -> KernelReport:
    """Times the linears of the first engine's layers, or of a standard layer, and the passes of every engine.

    Raises QuasarError for a directory that cannot be opened or is named twice, for an engine whose limits leave no room for
    the rows, for engines of a CPU and of a GPU together, and where the linears cannot run.
    """
    names = {directory.resolve().name for directory in engine_dirs}
    if len(names) < len(engine_dirs):
        raise QuasarError(f"engines are {', '.join(map(str, engine_dirs))}; allowed: directories of different names")
    manifests = {directory: Manifest.open(directory) for directory in engine_dirs}
    on_gpu = {manifest.target != "cpu" for manifest in manifests.values()}
    if len(on_gpu) > 1:
        targets = ", ".join(sorted({manifest.target for manifest in manifests.values()}))
        raise QuasarError(f"engines are for targets {targets}; allowed: those of a CPU alone, or of a GPU")
    gpu = True in on_gpu
    if gpu and options.threads is not None:
        raise QuasarError(f"threads is {options.threads}; a GPU has no use for it: leave it out")
    if not gpu and native.UNAVAILABLE:
        raise QuasarError(f"the kernels cannot be measured: {native.UNAVAILABLE}")
    threads = None if gpu else options.threads or usable_cpus()
    engines = {directory: open_engine(directory, threads=threads) for directory in engine_dirs}
    layer = layer_of(next(iter(engines.values())).config) if engines else STANDARD_LAYER
    buffer, reader, cache = _cpu_buffer(layer, threads) if threads else gpu_buffer(layer)

    with ExitStack() as stack:
        of_engine = {
            directory: engine_curves(directory.resolve().name, engine, options.rows, stack)
            for directory, engine in engines.items()
        }
        curves = [buffer.curve(kind, options.rows) for kind in KINDS]
        for of_one_kind in zip(*of_engine.values(), strict=True):  # engines that are compared run side by side
            curves += filter(None, of_one_kind)
        progress = stack.enter_context(progress_bar(progress_console))
        bar = progress.add_task("kernels", total=options.repeats * sum(len(curve.rows) for curve in curves))
        times = measure(curves, buffer.read, buffer.nbytes, options.repeats, lambda: progress.advance(bar))
    by_name = {curve.name: curve for curve in times}
    return KernelReport(
        options=options,
        reader=reader,
        last_level_cache=cache,
        buffer_bytes=buffer.nbytes,
        layer=layer,
        linears=tuple(times[: len(KINDS)]),
        engines=tuple(
            EngineTimes(
                directory,
                manifests[directory].recipe.quantized,
                *(by_name[curve.name] if curve else None for curve in curves),
            )
            for directory, curves in of_engine.items()
        ),
    )


def _cpu_buffer(layer: Layer, threads: int) -> tuple[WeightBuffer, str, int]:
    """(the buffer, who reads it, bytes of the cache before it)."""
    cache = last_level_cache()
    try:
        pool = native.thread_pool(threads)
    except RuntimeError as error:  # the system's limit of threads
        raise QuasarError(f"cannot start {threads} threads ({error}); ask for fewer with --threads") from None
    return WeightBuffer(layer, max(_BUFFER_PER_CACHE * cache, _LEAST_BUFFER), pool), count(threads, "thread"), cache


def gpu_buffer(layer: Layer) -> tuple[GpuWeightBuffer, str, int]:
    """As `_cpu_buffer`."""
    from quasar_trt.bench.gpu_weight_buffer import GpuWeightBuffer
    from quasar_trt.engines.cuda_device import CudaDevice
    from quasar_trt.engines.reference import operations_for

    device = CudaDevice()
    least_bytes = max(_BUFFER_PER_CACHE * device.cache, _LEAST_GPU_BUFFER)
    return GpuWeightBuffer(layer, least_bytes, device, operations_for(device.torch_device)), device.name, device.cache


def engine_curves(
    name: str, engine: Engine, rows: tuple[int, ...], stack: ExitStack
) -> tuple[Curve, Curve, Curve | None]:
    """(verify passes, a chunk of prefill, a pass of one row after a long context or None where max_seq_len is too small).

    The sequences that they run on are closed by `stack`. Raises QuasarError when a sequence or a pass cannot hold the rows, and
    for an engine that accepts inside.
    """
    if engine.capabilities.accepts_inside:
        raise QuasarError(f"engine {name} runs requests and has no passes to time; compare it with: quasar-trt bench")
    most = min(engine.capabilities.max_rows, engine.max_seq_len - 1)
    if rows[-1] > most:
        raise QuasarError(f"rows are {','.join(map(str, rows))}; engine {name} allows {most}")
    chunk = min(engine.capabilities.max_rows, engine.max_seq_len)

    def sequence(context: int) -> ScratchSequence:
        scratch = ScratchSequence(engine, context)
        stack.callback(scratch.close)
        return scratch

    def curve(what: str, rows: tuple[int, ...], run) -> Curve:
        return Curve(f"{name}: {what}", engine.weight_bytes_per_step, rows, run)

    context = min(CONTEXT, engine.max_seq_len - rows[-1])
    verify = curve(f"step at context {context}", rows, sequence(context).verify)
    prefill = curve("prefill", (chunk,), sequence(0).prefill)
    if engine.max_seq_len <= LONG_CONTEXT:
        return verify, prefill, None
    return verify, prefill, curve(f"step at context {LONG_CONTEXT}", (1,), sequence(LONG_CONTEXT).verify)
