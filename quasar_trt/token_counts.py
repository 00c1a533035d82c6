"""How often each token occurs in a growing list of ids."""

from __future__ import annotations

import numpy as np


class TokenCounts:
    """Counts that grow and shrink by one token at a time, and lie ready as arrays."""

    def __init__(self):
        self._index: dict[int, int] = {}  # token -> its place in the arrays, in the order of first occurrence
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def push(self, token: int) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            self._ids = np.resize(self._ids, 2 * index)
            self._counts = np.append(self._counts, np.zeros(index, np.float32))
        self._ids[index] = token
        self._counts[index] += 1

    def pop(self, token: int) -> None:
        """Takes back the last token pushed."""
        index = self._index[token]
        self._counts[index] -= 1
        if not self._counts[index]:  # it was pushed last and only once, so its place is the last one
            del self._index[token]

    @property
    def ids(self) -> np.ndarray:
        """[n] int64, each id that occurs once; valid until the next change."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> np.ndarray:
        """[n] float32, at least 1, in the order of `ids`; valid until the next change."""
        return self._counts[: len(self._index)]
