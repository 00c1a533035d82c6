"""How much of the prompts that come in a pass takes besides the requests that decode."""

from __future__ import annotations

import math

from quasar_trt.step_cost import StepCost, bounded_deviation

_UNNOTICED = 0.05  # seconds that a reader of a stream does not notice

# Each pass moves a cost by this share of its deviation, which counts as no larger than the bound; that of a prompt's row by
# less where a pass has few of them, because its time then tells little about them.
_RATE, _LARGEST_DEVIATION, _ROWS = 0.5, 1.0, 32
_MOST_MIXED = 15  # passes with prompts between two without, which tell what a pass costs without them


class PromptChunks:
    """Chooses the rows for prompts so that those who decode get their next token at most 0.05 s later, or in at most twice the
    time where that is more.

    What prompts take delays those who decode by as much in the end, however it is cut, and prompts are ready the sooner the
    larger the pieces are; pieces only have to be small enough that nobody notices a pause.

    The measured costs of passes are where it begins. What a row of a prompt and what the rest of a pass cost grows with what
    is cached before, so both are followed from pass to pass.

    cost: None takes all rows that there are.
    """

    def __init__(self, cost: StepCost | None, max_rows: int):
        self._cost = cost
        self._max_rows = max_rows
        self._scale = 1.0  # of the measured costs
        self._num_mixed = 0  # passes since the last one without prompts
        if cost:
            self._row_seconds = max(cost.seconds(max_rows) - cost.seconds(1), cost.seconds(1)) / max_rows

    def most_rows(self, num_decoding: int) -> int:
        """The rows that prompts may take beside so many requests that decode: mostly one or more, now and then none."""
        free = max(self._max_rows - num_decoding, 0)
        if not num_decoding or self._cost is None:
            return free
        if self._num_mixed == _MOST_MIXED:
            return 0
        spare = max(self._scale * self._cost.seconds(num_decoding), _UNNOTICED)
        return min(free, max(round(spare / self._row_seconds), 1))

    def observe(self, num_rows: int, num_prompt_rows: int, seconds: float) -> None:
        """A pass of so many rows, so many of them of prompts, took so long."""
        if self._cost is None:
            return
        num_others = num_rows - num_prompt_rows
        others = self._scale * self._cost.seconds(num_others) if num_others else 0.0
        if not num_prompt_rows:
            self._scale *= math.exp(_RATE * bounded_deviation(seconds, others, _LARGEST_DEVIATION))
            self._num_mixed = 0
            return
        per_row = (seconds - others) / num_prompt_rows
        weight = min(1.0, num_prompt_rows / _ROWS)
        self._row_seconds *= math.exp(
            _RATE * weight * bounded_deviation(per_row, self._row_seconds, _LARGEST_DEVIATION)
        )
        self._num_mixed += num_others > 0
