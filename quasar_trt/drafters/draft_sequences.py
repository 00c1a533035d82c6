"""What a drafting engine has in its caches, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quasar_trt.engines.base import Engine
from quasar_trt.kv_budget import KvBudget
from quasar_trt.prefix_cache import PrefixCache, common_prefix


@dataclass
class DraftSequence:
    """handle: the engine's. cached: the ids whose rows are in its cache."""

    handle: int
    cached: list[int]


class DraftSequences:
    """Sequences of a drafting engine within a budget of their own; those of ended requests are kept while there is room."""

    def __init__(self, engine: Engine, kv_budget: KvBudget, max_kept: int):
        self._engine = engine
        self._kv_budget = kv_budget
        self._prefixes = PrefixCache(engine, max_kept if engine.capabilities.fork else 0)
        self._of: dict[int, DraftSequence] = {}

    def settle(self, request_id: int, ids: Sequence[int]) -> DraftSequence | None:
        """The request's sequence, rolled back to what it holds of `ids` before the last of them.

        Opens one where there is none, from the longest prefix that is there; None where there is no room for it.
        """
        sequence = self._of.get(request_id) or self._open(ids)
        if sequence is not None:
            self._of[request_id] = sequence
            length = min(common_prefix(sequence.cached, ids), len(ids) - 1)
            del sequence.cached[length:]
            if self._engine.length(sequence.handle) > length:  # more too after a pass that was interrupted
                self._engine.truncate(sequence.handle, length)
        return sequence

    def has_room(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Whether so many more tokens of each of these handles fit, once kept sequences have given way."""
        return self._make_room(rows=rows)

    def close(self, request_id: int, keep: bool) -> None:
        """The request needs its sequence no more; `keep` keeps it for others that begin alike."""
        sequence = self._of.pop(request_id, None)
        if sequence is None:
            return
        if keep:
            self._prefixes.keep(sequence.handle, sequence.cached)
        else:
            self._engine.close(sequence.handle)

    def forget(self) -> None:
        """Closes what is kept."""
        self._prefixes.clear()

    def _open(self, ids: Sequence[int]) -> DraftSequence | None:
        if not self._make_room(self._engine.open_bytes):
            return None
        source, shared = self._prefixes.find(ids)
        cached = ids[:shared]
        for other in self._of.values() if self._engine.capabilities.fork else ():
            length = common_prefix(other.cached, ids)
            if length > len(cached) and length >= self._prefixes.min_length:
                source, cached = other.handle, other.cached[:length]
        if source is None:
            return DraftSequence(self._engine.open(), [])
        return DraftSequence(self._engine.fork(source), list(cached))

    def _make_room(self, num_bytes: int = 0, rows: Sequence[tuple[int, int]] = ()) -> bool:
        while num_bytes + self._kv_budget.growth(rows) > self._kv_budget.free:
            if not self._prefixes.drop():
                return False
        return True
