"""How much memory keys and values may take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.machine import total_memory
from quasar_trt.model_config import whole_number

_SHARE = 0.5  # of the memory that is available when the budget is made


class KvBudget:
    """The bytes that the caches of an engine's sequences may hold together.

    num_bytes: the bound; None for what the engine has taken for caches, or else half of the memory that is available now.
    max_seq_len: tokens of the longest sequence that the engine allows and that fits when it is alone.

    Raises QuasarError for a bound that is more than there is, or that holds no sequence of two tokens.
    """

    def __init__(self, engine: Engine, num_bytes: int | None = None):
        if num_bytes is None:
            num_bytes = (
                int(_SHARE * engine.available_memory) if engine.cache_capacity is None else engine.cache_capacity
            )
        else:
            _check(engine, whole_number("kv_cache_memory_bytes", num_bytes))
        self.num_bytes = num_bytes
        self._engine = engine
        self.max_seq_len = bisect_right(range(1, engine.max_seq_len + 1), self.num_bytes, key=engine.bytes_of)
        if self.max_seq_len < min(2, engine.max_seq_len):
            raise QuasarError(
                f"kv_cache_memory_bytes is {self.num_bytes}; allowed: at least {engine.bytes_of(2)}, which a sequence of two tokens takes"
            )

    @property
    def free(self) -> int:
        """Bytes that are not taken."""
        return self.num_bytes - self._engine.cache_bytes

    def growth(self, rows: Iterable[tuple[int, int]]) -> int:
        """Bytes, at most, that so many more tokens of each sequence take."""
        return sum(self._engine.growth(sequence, count) for sequence, count in rows)

    def fit_draft(self, sequence: int, num_rows: int, limit: int, room: int) -> tuple[int, int]:
        """The most draft tokens, up to `limit`, that fit into `room` bytes behind so many rows; and what is left of it."""
        growth = self._engine.growth(sequence, num_rows)
        while (extra := self._engine.growth(sequence, num_rows + limit) - growth) > room:
            limit -= 1
        return limit, room - extra

    def check_prompt(self, num_tokens: int) -> None:
        """Raises QuasarError for a prompt that leaves no room for another token, even alone."""
        if num_tokens < self.max_seq_len:
            return
        if self.max_seq_len == self._engine.max_seq_len:
            raise QuasarError(
                f"the prompt has {num_tokens} tokens; allowed: at most {self.max_seq_len - 1}, one less than the engine's "
                "max_seq_len; shorten it or build with a larger --max-seq-len"
            )
        raise QuasarError(
            f"the prompt has {num_tokens} tokens, whose keys and values and those of one more take "
            f"{self._engine.bytes_of(num_tokens + 1)} bytes; allowed: {self.num_bytes} (kv_cache_memory_bytes), which hold "
            f"{self.max_seq_len}; shorten it or allow more"
        )


def _check(engine: Engine, num_bytes: int) -> None:
    """Raises QuasarError for more than the engine has set aside, or than the machine has where caches take memory as they need it."""
    if engine.cache_capacity is not None:
        most, whose = (
            engine.cache_capacity,
            "which this engine has; leave it out or build with a larger --max-batch-size",
        )
    else:
        most, whose = (
            total_memory(),
            "the memory of this machine; give less, or leave it out for half of what is available",
        )
    if num_bytes > most:
        raise QuasarError(f"kv_cache_memory_bytes is {num_bytes}; allowed: at most {most}, {whose}")
