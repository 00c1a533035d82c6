"""The Triton kernels of a GPU against its own memory: copies, reads and BF16 linears, timed in the same run.

A call takes microseconds, less than launching it from Python, so calls are captured into a CUDA graph and its replay is timed.
They go round buffers that together are far larger than any cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from quasar_trt.bench.figures import spread
from quasar_trt.tables import FigureTable

Calls = Sequence[Callable[[], object]]
Time = Callable[[Calls], list[float]]  # seconds of one call on average, one figure per repeat


@dataclass(frozen=True)
class Sizes:
    """rows, columns, mlp: of what is quantized; head, block: of the Hadamard transforms. linears: (n, k) of each weight.

    buffers: bytes that the calls of one figure go round.
    """

    rows: int = 4096
    columns: int = 4096
    mlp: int = 12288
    head: int = 128
    block: int = 512
    linears: tuple[tuple[int, int], ...] = ((4096, 4096), (12288, 4096))
    linear_rows: tuple[int, ...] = tuple(range(1, 9))
    buffers: int = 1 << 30


@dataclass(frozen=True)
class GpuKernelTimes:
    """Seconds of one call, one figure per repeat, and the bytes that it moves.

    quantizing: operation -> (bytes, seconds). w8a8, bf16: (n, k, rows) -> seconds.
    """

    copy: tuple[int, list[float]]
    read: tuple[int, list[float]]
    quantizing: dict[str, tuple[int, list[float]]] = field(default_factory=dict)
    w8a8: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    bf16: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)

    def tables(self) -> list[FigureTable]:
        copy, read = _rate(*self.copy), _rate(*self.read)
        quantizing = [
            (name, f"{_rate(*times) / 1e9:.0f}", f"{100 * _rate(*times) / copy:.0f}%")
            for name, times in self.quantizing.items()
        ]
        linears = [
            (
                f"{n} x {k}",
                str(rows),
                f"{_rate(n * k, seconds) / 1e9:.0f}",
                f"{100 * _rate(n * k, seconds) / read:.0f}%",
                spread([b / a for a, b in zip(seconds, self.bf16[n, k, rows], strict=True)]),
            )
            for (n, k, rows), seconds in self.w8a8.items()
        ]
        return [
            FigureTable(
                "quantizing operations",
                ("operation", "GB/s", "of the\ncopy bandwidth"),
                quantizing,
                f"Bytes read and written; a copy moves {copy / 1e9:.0f} GB/s. (n): Hadamard blocks of n columns.",
            ),
            FigureTable(
                "w8a8_linear",
                ("weight", "rows", "GB/s", "of the\nread bandwidth", "BF16 linear\nover its time"),
                linears,
                f"Bytes of weights; a sum reads {read / 1e9:.0f} GB/s.",
            ),
        ]

    def to_dict(self) -> dict:
        """What JSON can hold."""
        return {
            "copy": _bytes_and_seconds(self.copy),
            "read": _bytes_and_seconds(self.read),
            "quantizing": {name: _bytes_and_seconds(times) for name, times in self.quantizing.items()},
            "linears": [
                {"n": n, "k": k, "rows": rows, "w8a8_seconds": seconds, "bf16_seconds": self.bf16[n, k, rows]}
                for (n, k, rows), seconds in self.w8a8.items()
            ],
        }


def _bytes_and_seconds(times: tuple[int, list[float]]) -> dict:
    return {"bytes": times[0], "seconds": times[1]}


def _rate(nbytes: int, seconds: list[float]) -> float:
    return nbytes / statistics.median(seconds)


def time_in_graph(calls: Calls, repeats: int = 20) -> list[float]:
    """Runs the calls once, captures them into a CUDA graph, and times its replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    seconds = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(calls))
    return seconds


def measure(operations: ModuleType, device: str, time: Time, sizes: Sizes) -> GpuKernelTimes:
    """Times the operations of a module with the signatures of `quasar_trt.plugins.reference` on tensors of `device`."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    def rounds(nbytes: int) -> range:
        return range(max(sizes.buffers // nbytes, 1))

    values, wide_values = sizes.rows * sizes.columns, sizes.rows * sizes.mlp
    x = [normal(sizes.rows, sizes.columns) for _ in rounds(2 * values)]
    wide = [normal(sizes.rows, sizes.mlp) for _ in rounds(2 * wide_values)]
    vector, wide_vector = (torch.rand(size, device=device) + 0.5 for size in (sizes.columns, sizes.mlp))
    times = GpuKernelTimes(
        copy=(4 * values, time([partial(torch.empty_like(part).copy_, part) for part in x])),
        read=(2 * values, time([partial(torch.sum, part.view(torch.float32)) for part in x])),
    )

    scales = 4 * sizes.rows
    smooth, silu, norm = operations.smooth_quantize, operations.silu_mul_smooth_quantize, operations.rms_norm_quantize
    for name, moved, calls in (
        ("smooth_quantize", 3 * values, [partial(smooth, part, vector) for part in x]),
        (f"smooth_quantize ({sizes.head})", 3 * values, [partial(smooth, part, vector, sizes.head) for part in x]),
        ("rms_norm_quantize", 3 * values, [partial(norm, part, vector, 1e-6) for part in x]),
        (
            f"silu_mul_smooth_quantize ({sizes.block})",
            5 * wide_values,
            [
                partial(silu, gate, up, wide_vector, sizes.block)
                for gate, up in zip(wide, [*wide[1:], wide[0]], strict=True)
            ],
        ),
    ):
        times.quantizing[name] = moved + scales, time(calls)

    for n, k in sizes.linears:
        weights = [torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device) for _ in rounds(n * k)]
        float_weights, weight_scale = [normal(n, k) for _ in rounds(2 * n * k)], torch.rand(n, device=device)
        for rows in sizes.linear_rows:
            part = normal(rows, k)
            q, scale = operations.quantize_8(part)
            times.w8a8[n, k, rows] = time(
                [partial(operations.w8a8_linear, q, scale, weight, weight_scale) for weight in weights]
            )
            times.bf16[n, k, rows] = time([partial(functional.linear, part, weight) for weight in float_weights])
    return times
