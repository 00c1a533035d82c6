"""The figures of a benchmark of kernels: the roofline, and what a pass costs beside another."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path

from quasar_trt.bench.curve import CurveTimes, ratios
from quasar_trt.bench.figures import median, spread
from quasar_trt.bench.options import KernelBenchOptions
from quasar_trt.machine import describe_machine
from quasar_trt.tables import FigureTable


@dataclass(frozen=True)
class EngineTimes:
    """One engine's passes: verify passes at a short context, one chunk of prefill, one row at a long context (or None)."""

    directory: Path
    quantized: bool
    verify: CurveTimes
    prefill: CurveTimes
    long_context: CurveTimes | None

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def prefill_over_decode(self) -> list[float]:
        """Tokens/s of prefill over those of decode, one ratio per repeat."""
        ((rows, seconds),) = self.prefill.seconds.items()
        return [rows * ratio for ratio in ratios(self.verify.seconds[1], seconds)]

    @property
    def long_over_short_context(self) -> list[float]:
        """Time of one row after the long context over that after the short one; empty where it was not measured."""
        return ratios(self.long_context.seconds[1], self.verify.seconds[1]) if self.long_context else []


@dataclass(frozen=True)
class KernelReport:
    """reader: the threads or the GPU that weights are read by. last_level_cache: in bytes, 0 where unknown. layer: columns that linears read -> output rows of one layer."""

    options: KernelBenchOptions
    reader: str
    last_level_cache: int
    buffer_bytes: int
    layer: dict[int, int]
    linears: tuple[CurveTimes, ...]
    engines: tuple[EngineTimes, ...]

    @property
    def curves(self) -> list[CurveTimes]:
        """Those that are set against the read bandwidth."""
        return [*self.linears, *(engine.verify for engine in self.engines)]

    @property
    def bandwidth(self) -> list[float]:
        """Every reading of the read bandwidth, bytes/s."""
        return [value for curve in self.curves for value in curve.bandwidth]

    @property
    def pairs(self) -> list[tuple[EngineTimes, EngineTimes]]:
        """Every (BF16 engine, INT8 engine)."""
        return [(bf16, int8) for bf16 in self.engines for int8 in self.engines if int8.quantized and not bf16.quantized]

    def to_dict(self) -> dict:
        return {
            "definition": "rate = weight bytes / seconds of a pass; share = rate over the read bandwidth, relative time = over that of one row, both within one repeat; medians over the repeats",
            "environment": describe_machine(),
            "options": dataclasses.asdict(self.options),
            "reader": self.reader,
            "last_level_cache_bytes": self.last_level_cache,
            "buffer_bytes": self.buffer_bytes,
            "layer": self.layer,
            "read_bandwidth": {"best": max(self.bandwidth), "median": statistics.median(self.bandwidth)},
            "curves": [_curve_dict(curve) for curve in self.curves],
            "engines": {
                engine.name: {
                    "directory": str(engine.directory),
                    "weights": "INT8" if engine.quantized else "BF16",
                    "prefill": _curve_dict(engine.prefill),
                    "prefill_over_decode": engine.prefill_over_decode,
                    "long_over_short_context": engine.long_over_short_context,
                }
                for engine in self.engines
            },
            "bf16_over_int8": [
                {
                    "bf16": bf16.name,
                    "int8": int8.name,
                    "weight_bytes": bf16.verify.weight_bytes / int8.verify.weight_bytes,
                    "seconds": {
                        rows: ratios(bf16.verify.seconds[rows], int8.verify.seconds[rows]) for rows in self.options.rows
                    },
                }
                for bf16, int8 in self.pairs
            ],
        }

    def tables(self) -> list[FigureTable]:
        return [
            *(self._roofline(curve) for curve in self.curves),
            *(self._ratio(*pair) for pair in self.pairs),
            *([self._other_passes()] if self.engines else []),
        ]

    def summary(self) -> str:
        cache = f"{self.last_level_cache / 2**20:.0f} MiB" if self.last_level_cache else "unknown"
        layer = ", ".join(f"{rows} x {columns}" for columns, rows in self.layer.items())
        return (
            f"Read bandwidth {statistics.median(self.bandwidth) / 1e9:.1f} GB/s (median, best {max(self.bandwidth) / 1e9:.1f}) by "
            f"{self.reader}; last-level cache {cache}; weights of the linears {self.buffer_bytes / 2**20:.0f} MiB, layers of "
            f"{layer}. Medians of {self.options.repeats} repeats (min..max); shares and relative times are taken within a "
            "repeat, because machines are noisy."
        )

    def _roofline(self, curve: CurveTimes) -> FigureTable:
        rows = [
            (
                str(rows),
                spread(curve.relative(rows)) if rows > 1 else "1.00x",
                median([rate / 1e9 for rate in curve.rates(rows)], ".1f", ""),
                f"{max(curve.rates(rows)) / 1e9:.1f}",
                spread([100 * share for share in curve.shares(rows)], ".0f", "%"),
            )
            for rows in curve.seconds
        ]
        headings = ("rows", "time\nover 1 row", "GB/s", "best\nGB/s", "of the\nread bandwidth")
        return FigureTable(f"{curve.name}, {curve.weight_bytes / 1e6:,.0f} MB of weights", headings, rows)

    def _ratio(self, bf16: EngineTimes, int8: EngineTimes) -> FigureTable:
        possible = bf16.verify.weight_bytes / int8.verify.weight_bytes
        rows = []
        for count in self.options.rows:
            measured = ratios(bf16.verify.seconds[count], int8.verify.seconds[count])
            rows.append(
                (str(count), spread(measured), median([100 * ratio / possible for ratio in measured], ".0f", "%"))
            )
        headings = ("rows", "BF16 / INT8\nstep time", "of the ratio\nof bytes")
        return FigureTable(f"{bf16.name} over {int8.name}: {possible:.2f}x the bytes of weights", headings, rows)

    def _other_passes(self) -> FigureTable:
        rows = [
            (engine.name, spread(engine.prefill_over_decode, ".1f"), spread(engine.long_over_short_context))
            for engine in self.engines
        ]
        headings = ("engine", "prefill tokens/s\nover decode", "step at long\nover short context")
        return FigureTable("other passes", headings, rows)


def _curve_dict(curve: CurveTimes) -> dict:
    return {
        "name": curve.name,
        "weight_bytes": curve.weight_bytes,
        "read_bandwidth": curve.bandwidth,
        "seconds": curve.seconds,
        "relative_time": _medians(curve, curve.relative),
        "share": _medians(curve, curve.shares),
    }


def _medians(curve: CurveTimes, figure) -> dict[int, float]:
    return {rows: statistics.median(figure(rows)) for rows in curve.seconds}
