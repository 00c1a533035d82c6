"""Passes of a drafting head: what they cost, and whether one is worth being made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from quasar_trt.drafters.drafting_passes import DraftingPasses
from quasar_trt.engines.base import Engine
from quasar_trt.step_cost import StepCost, compare, one_row

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS = 3  # times that each number of rows is measured; the fastest counts


class HeadPasses:
    """Decides before each pass of a head whether it is worth its time; all are, where the verifier's costs are not known.

    verifier: what passes of `engine` cost, or None. run: makes a pass of so many rows, by which its cost is measured now, up to
    max_rows.
    """

    def __init__(
        self, engine: Engine, verifier: StepCost | None, run: Callable[[int], None], max_rows: int = _ROWS[-1]
    ):
        self._passes = None
        if verifier:
            measured = [rows for rows in _ROWS if rows <= max_rows]
            self._cost = StepCost({rows: min(_seconds(run, rows) for _ in range(_ROUNDS)) for rows in measured})
            with one_row(engine) as theirs:
                self._passes = DraftingPasses(verifier, self._cost, compare(lambda: run(1), theirs))

    @property
    def seconds(self) -> float:
        """Of the passes of this step so far."""
        return self._passes.seconds if self._passes else 0.0

    def begin(self) -> None:
        """A step begins."""
        if self._passes:
            self._passes.begin()

    def is_worth(
        self, now: Sequence[Sequence[float]], longer: Sequence[Sequence[float]], num_rows: int, num_pending: int = 0
    ) -> bool:
        """See `DraftingPasses.is_worth`: a pass of `num_rows`; num_pending: rows that it reads in their place, where some are owed."""
        if not self._passes:
            return True
        seconds = self._cost.seconds
        return self._passes.is_worth(now, longer, seconds(num_rows), seconds(max(num_rows, num_pending)))

    def observe(self, num_rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        if self._passes and num_rows:
            self._cost.observe(num_rows, seconds)


def _seconds(run: Callable[[int], None], rows: int) -> float:
    began = perf_counter()
    run(rows)
    return perf_counter() - began
