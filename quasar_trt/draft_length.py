"""How many tokens of each draft are worth verifying now."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from quasar_trt.drafters.base import Draft
from quasar_trt.step_cost import StepCost
from quasar_trt.trials import Trials


class DraftLengths:
    """Chooses the draft lengths of a pass so that the tokens it is expected to emit per second are the most.

    A draft token is emitted when it and all before it on its path are accepted: with the product of their estimates, and
    siblings exclude each other, so these probabilities add up to the tokens that are expected. Of k draft tokens in all, the
    k likeliest are therefore the best, whichever requests they belong to; each draft's own go in order, because the product
    only falls along a path and a tree's likelier paths come first. What k tokens give divided by what k more rows cost then
    decides k; it may be 0. A tree loses its branches where they are not worth their rows, and becomes a chain.

    Longer drafts than seem to pay are still tried at times, lest a cost that was once measured too high stays so; this
    takes at most 0.5 % of the time.

    Tokens whose acceptance counts as certain are always verified: a drafter that draws its tokens may ask for that.

    cost: None verifies all that there are rows for.
    """

    def __init__(self, cost: StepCost | None):
        self._cost = cost
        self._trials = Trials()
        self._num_trials = 0

    def choose(
        self, drafts: Sequence[Draft], num_committed: int, num_emitting: int, free: int, seconds: float = 0.0
    ) -> list[int]:
        """The length for each draft.

        num_committed: rows of the pass without drafts; num_emitting: requests that emit a token anyway; free: rows that
        drafts may take. A chunk of a prompt costs what it costs with or without drafts, so only the rest of the pass
        counts.
        seconds: what the drafts have cost already.
        """
        lengths = [0] * len(drafts)
        ranked = sorted(
            (-probability, depth, index)
            for index, draft in enumerate(drafts)
            for depth, probability in enumerate(accumulate(draft.probabilities, min))
        )[:free]
        if ranked:
            count = (
                len(ranked) if self._cost is None else self._best_count(ranked, num_committed, num_emitting, seconds)
            )
            for _, _, index in ranked[:count]:
                lengths[index] += 1
        return lengths

    def _best_count(
        self, ranked: list[tuple[float, int, int]], num_committed: int, num_emitting: int, seconds: float
    ) -> int:
        """How many of the ranked tokens to verify: those that pay, and a few at times that do not."""
        cost = self._cost.seconds
        base = seconds + cost(num_emitting)
        plain = cost(num_committed)
        expected = num_emitting
        best, count = expected / base, 0
        for more, (negative, _, _) in enumerate(ranked, 1):
            expected -= negative
            rate = expected / (base + cost(num_committed + more) - plain)
            if rate > best or negative == -1.0:
                best, count = rate, more
        return count + self._num_tried(len(ranked) - count, num_committed + count)

    def _num_tried(self, most: int, num_rows: int) -> int:
        """How many tokens to try besides those that pay: mostly 0, else 1, 2, 3 ... up to `most` in turn."""
        if not most:
            return 0
        seconds = self._cost.seconds(num_rows)
        count = 1 + self._num_trials % most
        extra = self._cost.seconds(num_rows + count) - seconds
        if not self._trials.allow(seconds, extra):
            return 0
        self._num_trials += 1
        return count
