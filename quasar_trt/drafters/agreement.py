"""How likely the verifier is to accept what a drafting engine writes."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from quasar_trt.drafters.estimates import AcceptanceEstimates

# Kinds of tokens. At temperature 0: classes of the margin, by which the largest logit exceeds the next. Above: classes of the
# largest probability. The last kind stands for any.
_MARGINS = (0.1, 0.2, 0.4, 0.8)
_PROBABILITIES = (0.8, 0.97)
_PRIORS = (0.75, 0.9, 0.93, 0.98, 1.0, 0.96, 0.985, 1.0, 0.97)  # of INT8 against BF16, measured with a small chat model
ANY = len(_PRIORS) - 1


class Agreement:
    """The shares of a drafting engine's tokens that the verifier accepts, learned from its answers.

    of: [kind] -> the share; mean: that of all tokens.
    """

    def __init__(self):
        self._estimates = AcceptanceEstimates(_PRIORS)
        self.of = self._estimates.of

    @property
    def mean(self) -> float:
        return self.of[ANY]

    @staticmethod
    def kind_of_choice(logits: np.ndarray, token: int) -> int:
        """Of the most probable token, chosen by its row of logits [vocab] float32."""
        others = max(logits[:token].max(initial=-np.inf), logits[token + 1 :].max(initial=-np.inf))
        return bisect_right(_MARGINS, float(logits[token] - others))

    @staticmethod
    def kind_of_draw(q: np.ndarray) -> int:
        """Of a token drawn from q [vocab] float32, whichever it is."""
        return len(_MARGINS) + 1 + bisect_right(_PROBABILITIES, float(q.max()))

    def count(self, kind: int, right: bool) -> None:
        """A token of this kind was accepted, or not, given that those before it were."""
        for each in {kind, ANY}:
            self._estimates.count(each, right)
