"""Which tokens may follow which: for each token, the most probable ids of the row that the verifier computed for it last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_CANDIDATES = 8
_COLUMNS = 1024  # groups of logits, each so many ids apart, whose largest are looked at first

# Kinds of candidates, for estimates of their acceptance: classes of their probability among the row's best, and what
# followed the token in a prompt while no row of it has been seen.
_SHARES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97], np.float32)
IN_PROMPT = len(_SHARES) + 1
NUM_KINDS = IN_PROMPT + 1


class Adjacency:
    """Candidates to follow each token id: 8 at most, likeliest first, 40 bytes per id."""

    def __init__(self):
        self._ids = np.empty((0, NUM_CANDIDATES), np.int32)  # -1 where there is none
        self._kinds = np.empty((0, NUM_CANDIDATES), np.uint8)

    def candidates(self, token: int) -> list[tuple[int, int]]:
        """(id, kind) of each candidate to follow a token."""
        if token >= len(self._ids):
            return []
        pairs = zip(self._ids[token].tolist(), self._kinds[token].tolist(), strict=True)
        return [pair for pair in pairs if pair[0] >= 0]

    def put(self, tokens: Sequence[int], ids: np.ndarray, logits: np.ndarray) -> None:
        """Replaces the candidates of each of `tokens`; of equal tokens the last counts.

        ids, logits: [tokens, up to 8] of the largest logits of its row, in falling order, the first of which is finite.
        """
        self._grow(max(tokens) + 1)
        weights = np.exp(logits - logits[:, :1])
        count = ids.shape[1]
        self._ids[tokens, :count] = ids
        self._kinds[tokens, :count] = np.searchsorted(_SHARES, weights / weights.sum(axis=1, keepdims=True))

    def put_prompt(self, prompt: Sequence[int]) -> None:
        """What follows a token in a prompt becomes its candidate where it has none."""
        self._grow(max(prompt) + 1)
        before, after = np.array(prompt[:-1], np.int64), np.array(prompt[1:], np.int32)
        new = self._ids[before, 0] < 0
        self._ids[before[new], 0] = after[new]
        self._kinds[before[new], 0] = IN_PROMPT

    def _grow(self, num_tokens: int) -> None:
        more = num_tokens - len(self._ids)
        if more > 0:
            more = max(more, len(self._ids))  # of the size that it has, so that growing is rare
            self._ids = np.concatenate([self._ids, np.full((more, NUM_CANDIDATES), -1, np.int32)])
            self._kinds = np.concatenate([self._kinds, np.zeros((more, NUM_CANDIDATES), np.uint8)])


def largest(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values [rows, count] of the largest logits of each row [rows, vocab], in falling order; fewer where there are
    fewer. NaN is among them if it is in the row.

    Sorting out whole rows would take as long as a pass of a small model: the largest values lie in the `count` groups that have
    the largest maxima, or behind the last id that has its place in all groups.
    """
    rows, vocab = logits.shape
    count, end = min(count, vocab), vocab // _COLUMNS * _COLUMNS
    each = np.arange(rows)[:, None]
    ids = np.broadcast_to(np.arange(end, vocab), (rows, vocab - end))
    if end:
        maxima = logits[:, :end].reshape(rows, -1, _COLUMNS).max(axis=1)
        best = maxima.argpartition(-count, axis=1)[:, -count:, None]
        ids = np.concatenate([(best + np.arange(0, end, _COLUMNS)).reshape(rows, -1), ids], axis=1)
    values = logits[each, ids]
    falling = values.argsort(axis=1)[:, : -count - 1 : -1]
    return ids[each, falling], values[each, falling]
