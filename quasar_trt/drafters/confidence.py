"""The most probable ids of rows of logits, and how often ids of such a probability, or of such a rank, are accepted."""

from __future__ import annotations

import numpy as np

from quasar_trt.drafters.adjacency import largest
from quasar_trt.drafters.estimates import AcceptanceEstimates

MOST_GUESSES = 64  # for one place, and places; memory is taken for as many as are asked for

# Classes of the probability that a head gives a token, and their middles.
_BORDERS = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
_PRIORS = (0.01, 0.035, 0.075, 0.15, 0.28, 0.42, 0.58, 0.72, 0.85, 0.93, 0.98)


def most_probable(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and probabilities, each [rows, count], of the largest logits of each row [rows, vocab] float32, in falling order."""
    ids, values = largest(logits, count)
    most = values[:, :1]
    return ids, np.exp(values - most) / np.exp(logits - most).sum(axis=1, keepdims=True)


class ConfidenceEstimates:
    """Estimates of acceptance by the probability that a head gives a token."""

    def __init__(self):
        self._estimates = AcceptanceEstimates(_PRIORS)

    def of(self, probability: float) -> float:
        return self._estimates.of[np.searchsorted(_BORDERS, probability)]

    def count(self, probability: float, right: bool) -> None:
        """A token of this probability was right, or not, given that those before it were."""
        self._estimates.count(np.searchsorted(_BORDERS, probability), right)


# Of the first guess for a place, the second and so on.
_RANK_PRIORS = (0.5, 0.12, 0.06, 0.03)


class RankEstimates:
    """Estimates of acceptance by a guess's depth in the draft and its rank there, for guesses that are not made yet."""

    def __init__(self, num_depths: int, num_ranks: int):
        self._num_ranks = num_ranks
        priors = [_RANK_PRIORS[min(rank, len(_RANK_PRIORS) - 1)] for rank in range(num_ranks)]
        self._estimates = AcceptanceEstimates(num_depths * priors)

    def of(self, depth: int, rank: int) -> float:
        return self._estimates.of[depth * self._num_ranks + rank]

    def count(self, depth: int, rank: int, right: bool) -> None:
        """A guess of this depth and rank was right, or not, given that those before it were."""
        self._estimates.count(depth * self._num_ranks + rank, right)
