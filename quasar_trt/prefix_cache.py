"""Finished sequences whose keys and values serve later requests that begin alike, as the next turn of a chat does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from quasar_trt.engines.base import Engine

_COMPARED_FIRST = 64  # ids; most lists differ there already


class PrefixCache:
    """At most `max_sequences` sequences of an engine and their ids; the one that was used longest ago goes first.

    min_length: tokens; a shorter prefix is computed again in hardly more time than it takes to share it.
    """

    min_length = 64

    def __init__(self, engine: Engine, max_sequences: int):
        self._engine = engine
        self._max_sequences = max_sequences
        self._kept: dict[int, list[int]] = {}  # sequence -> its ids; the one used last is the last

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sequence: int, ids: Sequence[int]) -> None:
        """Takes over a sequence that holds as many of `ids` as are cached.

        Closes it where it is too short or another one begins with it, and closes those that it begins with.
        """
        ids = list(ids[: self._engine.length(sequence)])
        shared = {other: common_prefix(known, ids) for other, known in self._kept.items()}
        if len(ids) < self.min_length or len(ids) in shared.values():
            self._engine.close(sequence)
            return
        for other, length in shared.items():
            if length == len(self._kept[other]):
                self._close(other)
        self._kept[sequence] = ids
        if len(self._kept) > self._max_sequences:
            self.drop()

    def find(self, ids: Sequence[int]) -> tuple[int | None, int]:
        """(sequence, length) of the longest prefix of `ids` that is kept; (None, 0) where it is too short."""
        lengths = {sequence: common_prefix(known, ids) for sequence, known in self._kept.items()}
        sequence = max(lengths, key=lengths.__getitem__, default=None)
        if sequence is None or lengths[sequence] < self.min_length:
            return None, 0
        self._kept[sequence] = self._kept.pop(sequence)
        return sequence, lengths[sequence]

    def take(self, sequence: int | None) -> bool:
        """Gives a kept sequence away, to be closed or kept again by whoever asks; False where it is not kept."""
        return self._kept.pop(sequence, None) is not None

    def drop(self) -> bool:
        """Closes the sequence that was used longest ago; False where none is kept."""
        if self._kept:
            self._close(next(iter(self._kept)))
            return True
        return False

    def clear(self) -> None:
        while self.drop():
            pass

    def _close(self, sequence: int) -> None:
        del self._kept[sequence]
        self._engine.close(sequence)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two lists have in common from their beginning."""
    most = min(len(a), len(b))
    if a[:_COMPARED_FIRST] != b[:_COMPARED_FIRST]:
        most = min(most, _COMPARED_FIRST)
    # Comparing whole slices takes far less time than comparing ids one by one.
    return bisect_left(range(1, most + 1), True, key=lambda length: a[:length] != b[:length])
