"""How likely draft tokens are to be accepted, learned from what the verifier emits."""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR_WEIGHT = 4  # answers that a prior counts for
_MEMORY = 100  # answers over which an estimate averages; older ones fade, because texts differ


class AcceptanceEstimates:
    """Per kind of draft token, the share that turned out right; the drafter says which kinds there are.

    A draft token without probabilities is accepted iff it is the token that plain decoding emits, so any emitted token
    tells whether one that the drafter would have proposed for its place is right, verified or not: an estimate does not
    depend on the draft lengths that were chosen by it.

    of: [kind] -> the estimate, at first its prior.
    """

    def __init__(self, priors: Sequence[float]):
        self.of = list(priors)
        self._weights = [_PRIOR_WEIGHT] * len(self.of)

    def count(self, kind: int, right: bool) -> None:
        """One draft token of this kind was right, or not, given that those before it were."""
        weight = self._weights[kind]
        if weight < _MEMORY:
            weight += 1
            self._weights[kind] = weight
        self.of[kind] += (right - self.of[kind]) / weight
