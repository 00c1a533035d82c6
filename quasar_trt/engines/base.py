"""The engine interface: token ids in, rows of logits through `accept`, accepted cache rows kept.

An engine knows token ids, never text. Prefill, plain decode and verify are one call: `step` runs one pass over a batch of
sequences, each bringing its committed tokens that are not in the cache yet, followed by its draft tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quasar_trt.communicator import Communicator
from quasar_trt.drafters.base import NO_DRAFT, Draft
from quasar_trt.engines.sequence_sampling import SequenceSampling
from quasar_trt.engines.source_basis import SourceBasis
from quasar_trt.machine import available_memory
from quasar_trt.model_config import ModelConfig
from quasar_trt.sampling_params import SamplingParams


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; stated, not guessed.

    max_rows: rows (tokens) one pass may hold.
    accepts_inside: the engine samples and accepts by itself, as `sample_as` said, and never calls `accept`.
    tree: drafts may branch.
    hidden_states: the hidden states of each row can be read, and the embedding and the head used apart from a pass.
    fork: a sequence's cache can be shared with a copy.
    exact: row invariance holds bit for bit, so drafted ids equal plain ids.
    max_draft_len: the most draft tokens of a sequence in one pass; None for as many as there are rows for.
    """

    max_rows: int
    accepts_inside: bool
    tree: bool
    hidden_states: bool
    fork: bool
    exact: bool
    max_draft_len: int | None = None


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
    """What was accepted of one draft.

    emitted: the accepted draft ids, then one recovered or bonus id (absent only when the request finished before it).
    num_accepted_tokens: how many draft tokens were kept; their cache rows stay, the others are rolled back.
    path: of a tree, the indices of the kept draft tokens, each the parent of the next; of a chain None, the first are kept.

    Of an engine that accepts inside, besides:
    logits: the model's rows [emitted, vocab] float32 that the emitted ids came from, where the request wants logprobs.
    error: why the request cannot go on; nothing is emitted then.
    """

    emitted: tuple[int, ...]
    num_accepted_tokens: int
    path: tuple[int, ...] | None = None
    logits: np.ndarray | None = None
    error: str | None = None

    @property
    def rows(self) -> Sequence[int]:
        """The rows of logits of the last committed and the kept draft tokens, from which the emitted ids came in turn."""
        return range(self.num_accepted_tokens + 1) if self.path is None else (0, *[index + 1 for index in self.path])

    def after(self, count: int) -> Acceptance:
        """The same where `count` kept draft tokens come before the draft (see `Draft.after`)."""
        path = None if self.path is None else (*range(count), *[count + index for index in self.path])
        return Acceptance(self.emitted, count + self.num_accepted_tokens, path)


# (index in the batch, logits [1 + draft tokens, vocab] float32, valid only during the call) -> Acceptance.
# Row 0 belongs to the last committed token, row i to draft token i - 1, whose own path alone it sees.
Accept = Callable[[int, np.ndarray], Acceptance]


class Engine(ABC):
    """A compiled verifier. Sequence handles are small integers; using a closed one raises ValueError.

    weight_bytes_per_step: bytes of weights that one pass reads.
    cache_capacity: bytes for caches that the engine has taken once and for all; None where it takes them as they are needed.
    open_bytes: bytes of cache that a sequence holds from the moment it is opened, empty as it is.
    device: name of the GPU that it runs on, "" for the processor; device_bytes: of its memory that the engine has taken.
    communication_seconds: that passes have spent in collectives with other ranks so far, where the engine knows.
    source_basis: of the model that the engine was built from; None where it is not known or there are no hidden states.
    """

    config: ModelConfig
    capabilities: Capabilities
    max_seq_len: int
    weight_bytes_per_step: int
    cache_capacity: int | None = None
    open_bytes: int = 0
    device: str = ""
    device_bytes: int = 0
    communication_seconds: float = 0.0
    source_basis: SourceBasis | None = None

    def join(self, ranks: Communicator) -> None:  # noqa: B027 (most engines have nothing to do)
        """What the ranks of an engine do together once each has opened its part, before the first pass. Raises QuasarError, on
        all of them."""

    @abstractmethod
    def open(self) -> int:
        """A new empty sequence."""

    def sample_as(self, sequence: int, sampling: SequenceSampling) -> None:  # noqa: B027 (others leave it to `accept`)
        """How an engine that accepts inside samples the sequence's tokens; greedily before it is told."""

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

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes that the caches of all sequences hold, what forks share counted once."""

    @property
    def available_memory(self) -> int:
        """Bytes that caches which are taken as they are needed may still take."""
        return available_memory()

    @abstractmethod
    def growth(self, sequence: int, count: int) -> int:
        """Bytes, at most, by which `count` more tokens of the sequence make `cache_bytes` grow."""

    @abstractmethod
    def bytes_of(self, num_tokens: int) -> int:
        """Bytes that the cache of a sequence of so many tokens holds when it shares nothing."""

    @property
    def max_verify_rows(self) -> int:
        """The most rows of a pass over one sequence all of which are scored."""
        rows, drafted = min(self.capabilities.max_rows, self.max_seq_len), self.capabilities.max_draft_len
        return rows if drafted is None else min(rows, 1 + drafted)

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        """Passes keep the hidden states of these places from now on, none where there are none: those that enter layer i where the
        number is i, those behind the final norm where it is that of all layers.

        This and what follows is for engines that say `hidden_states`; all states are in the basis that the engine computes in, from
        which `source_basis` leads to that of the source model.
        """
        raise ValueError("this engine keeps no hidden states")

    def hidden_states(self, index: int, rows: Sequence[int]) -> np.ndarray:
        """[rows, kept places, hidden_size] float32 of rows of the last pass: those of its entry `index`, whose committed tokens come
        before its draft tokens. Raises ValueError for rows that are not there."""
        raise ValueError("this engine keeps no hidden states")

    def embeddings(self, ids: Sequence[int]) -> np.ndarray:
        """Rows [ids, hidden_size] float32 of the embedding."""
        raise ValueError("this engine gives no embeddings")

    def head_logits(self, states: np.ndarray) -> np.ndarray:
        """Logits [rows, vocab] float32 of states [rows, hidden_size] float32 as they are behind the final norm. Those of a rescored head
        are not rescored."""
        raise ValueError("this engine has no head apart from a pass")

    @abstractmethod
    def step(self, batch: Sequence[SequenceStep], accept: Accept) -> list[Acceptance | None]:
        """One pass over `batch`; afterwards each cache holds its committed and accepted tokens, nothing else.

        A tree's tokens take places in the pass and in `max_seq_len` as those of a chain do; what a row sees, and its position
        for RoPE, are those of its path alone.

        Returns one Acceptance per entry (None where needs_logits is False). Raises what `check` raises, and ValueError when
        `accept` keeps what is no beginning of a chain or no path of a tree. Whatever is raised, by `accept` too, every
        sequence is then as it was before.
        """

    def check_params(self, params: SamplingParams) -> None:  # noqa: B027 (rows of logits take every parameter)
        """Raises QuasarError naming a parameter that an engine that accepts inside cannot apply to every row."""

    def check(self, batch: Sequence[SequenceStep]) -> None:
        """Raises ValueError for a pass that this engine cannot run: more rows than `capabilities.max_rows`, a sequence
        longer than `max_seq_len` or named twice, no committed token, drafts without logits, a draft longer than
        `capabilities.max_draft_len`, parents that are no tree, or no chain where drafts are chains, an id outside of the
        vocabulary."""
        rows = sum(len(entry.tokens) + len(entry.draft.ids) for entry in batch)
        if rows > self.capabilities.max_rows:
            raise ValueError(f"the pass has {rows} rows; this engine allows {self.capabilities.max_rows}")
        if len({entry.sequence for entry in batch}) < len(batch):
            raise ValueError("a sequence appears twice in one pass")
        for entry in batch:
            drafted = len(entry.draft.ids)
            if not entry.tokens:
                raise ValueError(f"sequence {entry.sequence} brings no committed token")
            if drafted and not entry.needs_logits:
                raise ValueError(f"sequence {entry.sequence} brings draft tokens but needs no logits")
            most = self.capabilities.max_draft_len
            if most is not None and drafted > most:
                raise ValueError(f"sequence {entry.sequence} brings {drafted} draft tokens; this engine allows {most}")
            if entry.draft.is_tree:
                parents = entry.draft.parents
                if not self.capabilities.tree:
                    raise ValueError(f"draft parents {parents} are no chain; this engine verifies chains only")
                if len(parents) != drafted or any(not -1 <= parent < i for i, parent in enumerate(parents)):
                    raise ValueError(
                        f"draft parents {parents} are no tree of {drafted} tokens, parents before children"
                    )
            length = self.length(entry.sequence) + len(entry.tokens) + drafted
            if length > self.max_seq_len:
                raise ValueError(f"sequence {entry.sequence} would hold {length} tokens; allowed: {self.max_seq_len}")
            for ids in filter(len, (entry.tokens, entry.draft.ids)):
                for token in (min(ids), max(ids)):
                    if not 0 <= token < self.config.vocab_size:
                        raise ValueError(f"token id {token} is outside the vocabulary of {self.config.vocab_size}")


def checked_acceptance(acceptance: Acceptance, draft: Draft) -> Acceptance:
    """Raises ValueError when it keeps more draft tokens than there are, or of a tree another number than its path has, or
    a path that is none."""
    count, path = acceptance.num_accepted_tokens, acceptance.path or ()
    if not 0 <= count <= len(draft.ids):
        raise ValueError(f"{count} accepted tokens of {len(draft.ids)} draft tokens")
    if draft.is_tree:
        is_path = all(index in draft.children(before) for before, index in pairwise((-1, *path)))
        if len(path) != count or not is_path:
            raise ValueError(f"{path} is no path of {count} accepted tokens; the draft's parents are {draft.parents}")
    return acceptance
