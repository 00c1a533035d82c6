"""How much of the prompts that come in a pass takes besides the requests that decode."""

from __future__ import annotations

import math

from quasar_trt.step_cost import StepCost

_UNNOTICED = 0.05  # seconds that a reader of a stream does not notice

# Each pass moves the cost of a prompt's row by this share of its deviation, which counts as no larger than the bound; one
# with fewer rows of prompts by as much less, because its time tells less about them.
_RATE, _LARGEST_DEVIATION, _ROWS = 0.5, 1.0, 32


class PromptChunks:
    """Chooses the rows for prompts so that those who decode get their next token at most 0.05 s later, or in at most twice the
    time where that is more.

    What prompts take delays those who decode by as much in the end, however it is cut, and prompts are ready the sooner the
    larger the pieces are; pieces only have to be small enough that nobody notices a pause.

    What a row of a prompt costs grows with what is cached before it, so it is followed from pass to pass, beginning with
    the measured costs of passes.

    cost: None takes all rows that there are.
    """

    def __init__(self, cost: StepCost | None, max_rows: int):
        self._cost = cost
        self._max_rows = max_rows
        if cost:
            self._row_seconds = max(cost.seconds(max_rows) - cost.seconds(1), cost.seconds(1)) / max_rows

    def most_rows(self, num_decoding: int) -> int:
        """The rows that prompts may take beside so many requests that decode; at least 1, where the engine has that many."""
        free = self._max_rows - num_decoding
        if not num_decoding or self._cost is None:
            return free
        spare = max(self._cost.seconds(num_decoding), _UNNOTICED)
        return min(free, max(round(spare / self._row_seconds), 1))

    def observe(self, num_rows: int, num_prompt_rows: int, seconds: float) -> None:
        """A pass of so many rows, so many of them of prompts, took so long."""
        if self._cost is None or not num_prompt_rows:
            return
        extra = max(seconds - self._cost.seconds(num_rows - num_prompt_rows), 1e-9) / num_prompt_rows
        deviation = math.log(extra / self._row_seconds)
        deviation = max(-_LARGEST_DEVIATION, min(_LARGEST_DEVIATION, deviation))
        self._row_seconds *= math.exp(_RATE * min(1.0, num_prompt_rows / _ROWS) * deviation)
