"""Stand-ins without weights: an engine with prescribed logits, a drafter with prescribed proposals, a byte tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from quasar_trt.drafters.base import Draft, Drafter, DraftRequest
from quasar_trt.engines.base import Accept, Acceptance, Capabilities, Engine, SequenceStep, checked_acceptance
from quasar_trt.sampling import DRAFT


def one_hot_logits(token: int, vocab: int) -> np.ndarray:
    """A row whose argmax is `token`, by far."""
    row = np.zeros(vocab, np.float32)
    row[token] = 100.0
    return row


def random_logits(vocab: int, seed: int = 0, spread: float = 2.0) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Prefix -> a row of seeded normal logits that depends on every id of the prefix."""

    def row(prefix: tuple[int, ...]) -> np.ndarray:
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        return generator.normal(0.0, spread, vocab).astype(np.float32)

    return row


def chain_logits(chain: Sequence[int], num_prompt_tokens: int, vocab: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Prefix -> a row that makes the output `chain`, whatever was emitted; its last id repeats."""

    def row(prefix: tuple[int, ...]) -> np.ndarray:
        return one_hot_logits(chain[min(len(prefix) - num_prompt_tokens, len(chain) - 1)], vocab)

    return row


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The ids from the root to each token of a draft, the token included."""
    found: list[tuple[int, ...]] = []
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    for token, parent in zip(draft.ids, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@dataclass
class Pass:
    """What one call of `step` brought, per sequence, and the positions it verified."""

    sequences: list[int]
    tokens: list[list[int]]
    drafts: list[tuple[int, ...]]
    positions: list[range]
    needs_logits: list[bool]


@dataclass
class StubEngine(Engine):
    """Logits prescribed as a function of all ids up to the row's own, on its path; the cache is a list of ids per sequence.

    An interrupted step leaves its rows in the caches. Memory is counted as pages of `page_size` ids, a byte per id, which
    forks share until one of them writes; more than `memory` is a MemoryError.

    passes: every call of `step`; accepted: what came out of it. closed: handles in the order of closing.
    """

    logits: Callable[[tuple[int, ...]], np.ndarray]
    vocab: int
    max_seq_len: int = 256
    max_rows: int = 64
    tree: bool = True
    weight_bytes_per_step: int = 0
    page_size: int = 4
    memory: int = 1 << 40
    passes: list[Pass] = field(default_factory=list)
    accepted: list[list[Acceptance | None]] = field(default_factory=list)
    caches: dict[int, list[int]] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)
    pages: dict[int, list[object]] = field(default_factory=dict)

    def __post_init__(self):
        self.config = SimpleNamespace(vocab_size=self.vocab)
        self.capabilities = Capabilities(
            max_rows=self.max_rows, accepts_inside=False, tree=self.tree, hidden_states=False, fork=True, exact=True
        )

    def open(self) -> int:
        handle = len(self.caches) + len(self.closed)
        self.caches[handle] = []
        self.pages[handle] = []
        return handle

    def fork(self, sequence: int) -> int:
        handle = self.open()
        self.caches[handle] = list(self._cache(sequence))
        self.pages[handle] = list(self.pages[sequence])
        return handle

    def close(self, sequence: int) -> None:
        self._cache(sequence)
        del self.caches[sequence], self.pages[sequence]
        self.closed.append(sequence)

    def length(self, sequence: int) -> int:
        return len(self._cache(sequence))

    def truncate(self, sequence: int, length: int) -> None:
        cache = self._cache(sequence)
        if length > len(cache):
            raise ValueError(f"sequence {sequence} holds {len(cache)} tokens, fewer than {length}")
        del cache[length:]
        del self.pages[sequence][-(-length // self.page_size) :]

    @property
    def cache_bytes(self) -> int:
        return self.page_size * len({page for pages in self.pages.values() for page in pages})

    def growth(self, sequence: int, count: int) -> int:
        length = self.length(sequence)
        copied = count > 0 and length % self.page_size > 0 and self._is_shared(self.pages[sequence][-1])
        return self.bytes_of(length + count) - self.bytes_of(length) + self.page_size * copied

    def bytes_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    def _is_shared(self, page: object) -> bool:
        return sum(page in pages for pages in self.pages.values()) > 1

    def _extend(self, sequence: int, ids: Sequence[int]) -> None:
        pages, cache = self.pages[sequence], self._cache(sequence)
        if ids and len(cache) % self.page_size and self._is_shared(pages[-1]):
            pages[-1] = object()
        cache.extend(ids)
        pages += [object() for _ in range(len(pages), -(-len(cache) // self.page_size))]
        if self.cache_bytes > self.memory:
            raise MemoryError(f"{self.cache_bytes} bytes of cache, more than {self.memory}")

    def step(self, batch: Sequence[SequenceStep], accept: Accept) -> list[Acceptance | None]:
        self.check(batch)
        starts = [self.length(item.sequence) for item in batch]
        rows = [len(item.tokens) + len(item.draft) for item in batch]
        self.passes.append(
            Pass(
                sequences=[item.sequence for item in batch],
                tokens=[list(item.tokens) for item in batch],
                drafts=[item.draft.ids for item in batch],
                positions=[range(start, start + count) for start, count in zip(starts, rows, strict=True)],
                needs_logits=[item.needs_logits for item in batch],
            )
        )
        self.accepted.append([self._step_one(index, item, accept) for index, item in enumerate(batch)])
        return self.accepted[-1]

    def _step_one(self, index: int, item: SequenceStep, accept: Accept) -> Acceptance | None:
        cache = self._cache(item.sequence)
        self._extend(item.sequence, item.tokens)
        if not item.needs_logits:
            return None
        committed = len(cache)
        self._extend(item.sequence, item.draft.ids)
        prefix = tuple(cache[:committed])
        rows = [self.logits(prefix), *[self.logits(prefix + path) for path in paths(item.draft)]]
        acceptance = checked_acceptance(accept(index, np.array(rows, np.float32)), item.draft)
        kept = range(acceptance.num_accepted_tokens) if acceptance.path is None else acceptance.path
        cache[committed : committed + len(kept)] = [item.draft.ids[index] for index in kept]
        self.truncate(item.sequence, committed + len(kept))
        return acceptance

    def _cache(self, sequence: int) -> list[int]:
        if sequence not in self.caches:
            raise ValueError(f"sequence {sequence} is not open")
        return self.caches[sequence]


class GatedEngine(StubEngine):
    """Its passes wait for `gate`, which is open at first; `fault` is raised by the next one."""

    fault: BaseException | None = None

    def __post_init__(self):
        super().__post_init__()
        self.gate = threading.Event()
        self.gate.set()

    def step(self, batch, accept):
        assert self.gate.wait(30)
        fault, self.fault = self.fault, None
        if fault:
            super().step(batch[:1], accept)
            raise fault
        return super().step(batch, accept)


class StubDrafter(Drafter):
    """Proposes what `rule(context, limit)` says (a list of ids, or ids with [len, vocab] probabilities).

    calls: (hook, request id, argument) of every call but propose; asked: the requests it was asked about.
    """

    def __init__(self, rule: Callable[[Sequence[int], int], object], num_speculative_tokens: int = 8):
        self.rule = rule
        self.num_speculative_tokens = num_speculative_tokens
        self.calls: list[tuple] = []
        self.asked: list[tuple[int, int]] = []

    def called(self, hook: str) -> list[int]:
        """Request ids in the order of its calls."""
        return [call[1] for call in self.calls if call[0] == hook]

    def start(self, request_id: int, context: Sequence[int]) -> None:
        self.calls.append(("start", request_id, tuple(context)))

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += [(request.request_id, len(request.context)) for request in batch]
        return [self._propose_one(request) for request in batch]

    def _propose_one(self, request: DraftRequest) -> Draft:
        limit = min(request.limit, self.num_speculative_tokens)
        proposal = self.rule(request.context, limit)
        ids, probs = proposal if isinstance(proposal, tuple) else (proposal, None)
        return Draft(tuple(ids[:limit]), probs=None if probs is None else probs[:limit])

    def observe(self, request_id: int, emitted: Sequence[int], num_accepted_tokens: int) -> None:
        self.calls.append(("observe", request_id, tuple(emitted), num_accepted_tokens))

    def stop(self, request_id: int) -> None:
        self.calls.append(("stop", request_id))


class SamplingDrafter(Drafter):
    """Draws from the softmax of prescribed logits after the request's own temperature (above 0) and filters."""

    def __init__(self, logits: Callable[[tuple[int, ...]], np.ndarray], num_speculative_tokens: int):
        self.logits = logits
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose_one(request) for request in batch]

    def _propose_one(self, request: DraftRequest) -> Draft:
        ids, probs = list(request.context), []
        for _ in range(min(request.limit, self.num_speculative_tokens)):
            row = self.logits(tuple(ids))
            q = request.sampler.target(row, ids[len(request.context) :])
            probs.append(q.dense(len(row)))
            ids.append(q.pick(request.sampler.uniform(len(ids), DRAFT)))
        return Draft(tuple(ids[len(request.context) :]), probs=np.stack(probs))


def perfect_rule(logits: Callable[[tuple[int, ...]], np.ndarray]) -> Callable[[Sequence[int], int], list[int]]:
    """Drafts exactly what the engine with these logits emits greedily."""

    def rule(context: Sequence[int], limit: int) -> list[int]:
        ids = list(context)
        for _ in range(limit):
            ids.append(int(np.argmax(logits(tuple(ids)))))
        return ids[len(context) :]

    return rule


class ByteTokenizer:
    """One token per byte; id 256 is the end of sequence and gives no text."""

    bos_token_id = None
    eos_token_id = 256

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        end = b"" if skip_special_tokens else b"<end>"
        return b"".join(bytes([token]) if token < 256 else end for token in token_ids).decode(errors="replace")
