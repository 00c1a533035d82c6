"""The engine interface: token ids in, rows of logits through `accept`, accepted cache rows kept.

An engine knows token ids, never text. Prefill, plain decode and verify are one call: `step` runs one pass over a batch of
sequences, each bringing its committed tokens that are not in the cache yet, followed by its draft tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quasar_trt.drafters.base import NO_DRAFT, Draft
from quasar_trt.model_config import ModelConfig


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; stated, not guessed.

    max_rows: rows (tokens) one pass may hold.
    accepts_inside: the engine applies its own acceptance and ignores the `accept` callback's rule.
    tree: drafts may branch.
    hidden_states: the last hidden states of each row can be observed.
    fork: a sequence's cache can be shared with a copy.
    exact: row invariance holds bit for bit, so drafted ids equal plain ids.
    """

    max_rows: int
    accepts_inside: bool
    tree: bool
    hidden_states: bool
    fork: bool
    exact: bool


@dataclass(frozen=True)
class SequenceStep:
    """One sequence's part of a pass.

    tokens: committed ids that are not in the cache yet, at least one.
    draft: draft tokens after them.
    needs_logits: False for a chunk of a prompt that is not its last; `accept` is then not called for it.
    """

    sequence: int
    tokens: Sequence[int]
    draft: Draft = NO_DRAFT
    needs_logits: bool = True


@dataclass(frozen=True)
class Acceptance:
    """The verdict on one draft.

    emitted: the accepted draft ids, then one recovered or bonus id (absent only when the request finished before it).
    num_accepted_tokens: how many draft tokens were kept; their cache rows stay, later ones are rolled back.
    """

    emitted: tuple[int, ...]
    num_accepted_tokens: int


# (index in the batch, logits [1 + draft tokens, vocab] float32, valid only during the call) -> Acceptance.
# Row 0 belongs to the last committed token, row i to draft token i - 1.
Accept = Callable[[int, np.ndarray], Acceptance]


class Engine(ABC):
    """A compiled verifier. Sequence handles are small integers; using a closed one raises ValueError."""

    config: ModelConfig
    capabilities: Capabilities
    max_seq_len: int
    weight_bytes_per_step: int  # bytes of weights that one pass reads

    @abstractmethod
    def open(self) -> int:
        """A new empty sequence."""

    @abstractmethod
    def fork(self, sequence: int) -> int:
        """A new sequence with the same cache contents."""

    @abstractmethod
    def close(self, sequence: int) -> None:
        """Frees the sequence's cache."""

    @abstractmethod
    def length(self, sequence: int) -> int:
        """Cached tokens of the sequence."""

    @abstractmethod
    def truncate(self, sequence: int, length: int) -> None:
        """Rolls the cache back to `length` tokens. Raises ValueError when it holds fewer."""

    @abstractmethod
    def step(self, batch: Sequence[SequenceStep], accept: Accept) -> list[Acceptance | None]:
        """One pass over `batch`; afterwards each cache holds its committed and accepted tokens, nothing else.

        Returns one Acceptance per entry (None where needs_logits is False). Raises ValueError when the pass would hold more
        rows than `capabilities.max_rows` or a sequence more tokens than `max_seq_len`, before anything has changed.
        """
