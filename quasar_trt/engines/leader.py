"""The engine of rank 0 where there are several ranks: what is done to it is done to the engines of the others too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Accept, Acceptance, Engine, SequenceStep
from quasar_trt.ranks import Leader, Step


class LeaderEngine(Engine):
    """See `Engine`: `engine`, rank 0's part of a tensor parallel engine, and through `leader` those of the other ranks.

    Bytes, of caches and of weights, are those of one rank. hosts: the machine of each rank.
    """

    def __init__(self, engine: Engine, leader: Leader, number: int, memory: int):
        """number: of the engine among all that were opened. memory: bytes that caches may take on any rank."""
        self.config = engine.config
        self.capabilities = engine.capabilities
        self.max_seq_len = engine.max_seq_len
        self.weight_bytes_per_step = engine.weight_bytes_per_step
        self.cache_capacity = engine.cache_capacity
        self.open_bytes = engine.open_bytes
        self.device, self.device_bytes = engine.device, engine.device_bytes
        self.threads = getattr(engine, "threads", None)
        self.isa = getattr(engine, "isa", None)
        self.hosts = leader.ranks.hosts
        self._engine = engine
        self._leader = leader
        self._number = number
        self._memory = memory
        self._calls: list[tuple[str, tuple[int, ...]]] = []  # since the last step

    def open(self) -> int:
        return self._call("open")

    def fork(self, sequence: int) -> int:
        return self._call("fork", sequence)

    def close(self, sequence: int) -> None:
        self._call("close", sequence)

    def truncate(self, sequence: int, length: int) -> None:
        self._call("truncate", sequence, length)

    def _call(self, method: str, *arguments: int) -> int | None:
        result = getattr(self._engine, method)(*arguments)  # first: what it refuses happens nowhere
        self._calls.append((method, arguments))
        return result

    def length(self, sequence: int) -> int:
        return self._engine.length(sequence)

    @property
    def cache_bytes(self) -> int:
        return self._engine.cache_bytes

    def growth(self, sequence: int, count: int) -> int:
        return self._engine.growth(sequence, count)

    def bytes_of(self, num_tokens: int) -> int:
        return self._engine.bytes_of(num_tokens)

    @property
    def available_memory(self) -> int:
        return self._memory

    @property
    def communication_seconds(self) -> float:
        return self._engine.communication_seconds

    def step(self, batch: Sequence[SequenceStep], accept: Accept) -> list[Acceptance | None]:
        self.check(batch)
        if not batch:
            return []
        before = self.length(batch[0].sequence)
        calls, self._calls = self._calls, []
        told = [replace(entry, draft=Draft(entry.draft.ids, entry.draft.parents)) for entry in batch]
        self._leader.begin(Step(self._number, calls, told))
        scored = False

        def decide(index: int, rows: np.ndarray) -> Acceptance:
            nonlocal scored
            scored = True
            return accept(index, rows)

        try:
            accepted = self._engine.step(batch, decide)
        except BaseException as error:
            if scored or self.length(batch[0].sequence) > before:
                self._leader.meet()
            elif isinstance(error, Exception):  # within the pass, where the others cannot know of it
                self._leader.ranks.fail(repr(error))
            raise
        self._leader.meet(accepted)
        return accepted
