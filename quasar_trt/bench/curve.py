"""Times of passes over weights for several numbers of rows, measured beside the read bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True)
class Curve:
    """What is timed.

    weight_bytes: what one pass reads of the weights, whatever its number of rows.
    rows: the numbers of rows; figures are relative to the first. run(rows) makes one pass.
    """

    name: str
    weight_bytes: int
    rows: Sequence[int]
    run: Callable[[int], object]


@dataclass(frozen=True)
class CurveTimes:
    """seconds: rows -> one time per repeat. bandwidth: read bandwidth in bytes/s, measured in the same repeats.

    Ratios are paired: both sides come from the same repeat.
    """

    name: str
    weight_bytes: int
    seconds: dict[int, list[float]]
    bandwidth: list[float]

    def relative(self, rows: int) -> list[float]:
        """Time over that of the fewest rows, one ratio per repeat."""
        return ratios(self.seconds[rows], self.seconds[min(self.seconds)])

    def rates(self, rows: int) -> list[float]:
        """Weight bytes/s, one per repeat."""
        return [self.weight_bytes / seconds for seconds in self.seconds[rows]]

    def shares(self, rows: int) -> list[float]:
        """Weight bytes/s over the read bandwidth, one ratio per repeat."""
        return ratios(self.rates(rows), self.bandwidth)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def measure(
    curves: Sequence[Curve],
    read: Callable[[], object],
    read_bytes: int,
    repeats: int,
    advance: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = perf_counter,
) -> list[CurveTimes]:
    """Times every curve in every repeat, and right before each curve `read`, which reads `read_bytes` of memory.

    Whatever is timed has just run once untimed: caches hold what a repetition leaves there, and the threads of what ran
    before have gone to sleep. `advance` is called after each time taken of a curve.
    """

    def timed(run: Callable[[], object]) -> float:
        run()
        started = clock()
        run()
        return clock() - started

    times = [CurveTimes(curve.name, curve.weight_bytes, {rows: [] for rows in curve.rows}, []) for curve in curves]
    for _ in range(repeats):
        for curve, taken in zip(curves, times, strict=True):
            taken.bandwidth.append(read_bytes / timed(read))
            for rows in curve.rows:
                taken.seconds[rows].append(timed(lambda curve=curve, rows=rows: curve.run(rows)))
                advance()
    return times
