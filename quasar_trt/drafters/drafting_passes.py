"""Which passes of a drafter that computes are worth being made."""

from __future__ import annotations

from collections.abc import Sequence

from quasar_trt.step_cost import StepCost
from quasar_trt.trials import Trials


class DraftingPasses:
    """Decides before each drafting pass whether it is worth its time.

    A step drafts and verifies; what counts is the tokens it is expected to emit per second, the seconds of its drafting passes
    included. They are compared for what there is now and for one pass more.

    A pass is tried now and then though it does not seem to pay, lest a drafter that was once right too seldom is never asked again;
    this takes at most 0.5 % of the time.

    verifier, drafting: what passes cost. ratio: seconds of a drafting pass of one row over those of the verifier. What raises or lowers the
        level of the verifier's costs is taken to do the same to those of drafting, which may not have been tried for a while.
    seconds: of the drafting passes of this step so far.
    """

    def __init__(self, verifier: StepCost, drafting: StepCost, ratio: float):
        self.seconds = 0.0
        self._verifier = verifier
        self._drafting = drafting
        self._level = verifier.level  # that the other has followed
        drafting.level *= ratio * verifier.seconds(1) / drafting.seconds(1)
        self._trials = Trials()  # of drafting passes, for a share of the verifier's time

    def begin(self) -> None:
        """A step begins."""
        self.seconds = 0.0
        self._drafting.level *= self._verifier.level / self._level
        self._level = self._verifier.level

    def is_worth(
        self,
        now: Sequence[Sequence[float]],
        longer: Sequence[Sequence[float]],
        seconds: float,
        whole_seconds: float | None = None,
    ) -> bool:
        """Whether a pass of so many seconds is to be made; it is counted where it is.

        now, longer: of each request of the step, without and with the pass, its draft tokens' probabilities that they and all
        before them on their paths are accepted.
        whole_seconds: where a first pass also computes what is owed anyway, the seconds of both.
        """
        worth = self._rate(longer, seconds) > self._rate(now, 0.0)
        if not worth and not self.seconds:
            worth = self._trials.allow(self._verifier.seconds(len(now)), whole_seconds or seconds)
        if worth:
            self.seconds += seconds
        return worth

    def _rate(self, chances: Sequence[Sequence[float]], seconds: float) -> float:
        """Tokens per second of a step whose draft tokens have these chances, when the best of them are verified."""
        expected = count = len(chances)
        seconds += self.seconds
        best = expected / (seconds + self._verifier.seconds(count))
        for chance in sorted((each for draft in chances for each in draft), reverse=True):
            count += 1
            expected += chance
            best = max(best, expected / (seconds + self._verifier.seconds(count)))
        return best
