"""How much of the prompts that come in a pass takes besides the requests that decode."""

from __future__ import annotations

import math

from quasar_trt.step_cost import StepCost

# Each pass moves the cost of a prompt's row by this share of its deviation, which counts as no larger than the bound; a
# chunk of fewer rows teaches nothing.
_RATE, _LARGEST_DEVIATION, _FEWEST_ROWS = 0.5, 1.0, 8


class PromptChunks:
    """Chooses the rows for prompts: those who decode get their next token in at most twice the time, or, where more requests
    wait for their first token than for their next, in more time by as much as they are more.

    What a row of a prompt costs grows with what is cached before it, so it is followed from pass to pass, beginning with
    the measured costs of passes.

    cost: None takes all rows that there are.
    """

    def __init__(self, cost: StepCost | None, max_rows: int):
        self._cost = cost
        self._max_rows = max_rows
        if cost:
            self._row_seconds = max(cost.seconds(max_rows) - cost.seconds(1), cost.seconds(1)) / max_rows

    def most_rows(self, num_decoding: int, num_prompts: int) -> int:
        """The rows that so many prompts may take beside so many requests that decode; at least 1, where there are any."""
        free = self._max_rows - num_decoding
        if not num_decoding or self._cost is None:
            return free
        spare = self._cost.seconds(num_decoding) * max(1.0, num_prompts / num_decoding)
        return min(free, max(round(spare / self._row_seconds), 1))

    def observe(self, num_rows: int, num_prompt_rows: int, seconds: float) -> None:
        """A pass of so many rows, so many of them of prompts, took so long."""
        if self._cost is None or num_prompt_rows < _FEWEST_ROWS:
            return
        extra = max(seconds - self._cost.seconds(num_rows - num_prompt_rows), 1e-9) / num_prompt_rows
        deviation = math.log(extra / self._row_seconds)
        self._row_seconds *= math.exp(_RATE * max(-_LARGEST_DEVIATION, min(_LARGEST_DEVIATION, deviation)))
