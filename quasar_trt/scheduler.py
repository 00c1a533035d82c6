"""The speculative loop: draft -> verify -> accept -> commit -> roll back, many requests at once.

Requests are independent rows of one pass. A prompt enters the cache in chunks; its last chunk already carries a draft.
Tokens depend on the request alone, so it does not matter who its neighbours are. Token ids only, no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from quasar_trt.draft_length import DraftLengths
from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest
from quasar_trt.engines.base import Acceptance, Engine
from quasar_trt.errors import QuasarError
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.request import Request
from quasar_trt.step_cost import StepCost


class Scheduler:
    """Advances requests over one engine and at most one drafter.

    max_batch_size: requests per pass; further ones wait and join as others finish.
    max_draft_len: the most draft tokens per request and pass.
    step_cost: by which draft lengths are chosen; None verifies every draft whole, as far as there are rows for it.
    stats: metrics over all requests so far.

    Raises QuasarError for limits that leave nothing to do and when the drafter may propose more than max_draft_len.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        max_batch_size: int,
        max_draft_len: int,
        step_cost: StepCost | None = None,
    ):
        if max_batch_size < 1:
            raise QuasarError(f"max_batch_size is {max_batch_size}; allowed: 1 or more")
        if max_draft_len < 0:
            raise QuasarError(f"max_draft_len is {max_draft_len}; allowed: 0 (no drafts) or more")
        wanted = drafter.num_speculative_tokens if drafter else None
        if wanted is not None and wanted > max_draft_len:
            raise QuasarError(
                f"num_speculative_tokens is {wanted}; allowed: at most {max_draft_len}, the engine's max_draft_len; ask "
                "for fewer or build with a larger --max-draft-len"
            )
        self.stats = SpeculationMetrics()
        self._engine = engine
        self._drafter = drafter
        self._can_fork = engine.capabilities.fork
        self._max_rows = engine.capabilities.max_rows
        self._max_active = min(max_batch_size, self._max_rows)  # each active request has a row in every pass
        self._max_draft_len = max_draft_len if wanted is None else wanted
        self._step_cost = step_cost
        self._draft_lengths = DraftLengths(step_cost)
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []

    def submit(self, request: Request) -> None:
        """Puts a request behind those that wait. Whoever submits also releases."""
        self._waiting.append(request)

    def step(self) -> None:
        """Advances every active request by one pass.

        Whatever interrupts it, each request stays as it was before the pass or as it is after it.
        """
        self._admit()
        try:
            self._advance()
        except BaseException:
            for request in self._active:
                if self._engine.length(request.sequence) > request.num_cached:
                    self._engine.truncate(request.sequence, request.num_cached)
            raise
        finally:
            self.release([request for request in self._active if request.finish_reason is not None])

    def _advance(self) -> None:
        active, chunks = self._active, self._chunks()
        accept_seconds = 0.0

        started = perf_counter()
        drafts = self._draft(chunks)
        drafted = perf_counter()

        def accept(index: int, logits: np.ndarray) -> Acceptance:
            nonlocal accept_seconds
            began = perf_counter()
            acceptance = active[index].accept(logits, chunks[index], drafts[index])
            accept_seconds += perf_counter() - began
            return acceptance

        batch = [request.step(chunk, draft) for request, chunk, draft in zip(active, chunks, drafts, strict=True)]
        acceptances = self._engine.step(batch, accept)  # rolls its caches back to what was accepted
        seconds = (drafted - started, perf_counter() - drafted - accept_seconds, accept_seconds)

        self.stats.add_seconds(*seconds)
        if self._step_cost and all(len(chunk) == 1 for chunk in chunks):
            self._step_cost.observe(sum(1 + len(draft) for draft in drafts), seconds[1])
        for request, chunk, draft, acceptance in zip(active, chunks, drafts, acceptances, strict=True):
            request.metrics.add_seconds(*seconds)
            if request.reaches_end(chunk):
                self._commit(request, chunk, draft, acceptance)
            else:
                request.advance(chunk)

    def release(self, requests: Sequence[Request]) -> None:
        """Takes requests out, finished or not, and frees what they hold; those already out are left alone."""
        for request in requests:
            if request.sequence is not None:
                self._active.remove(request)
                self._engine.close(request.sequence)
                request.sequence = None
                if self._drafter:
                    self._drafter.stop(request.id)
            elif request in self._waiting:
                self._waiting.remove(request)

    def _admit(self) -> None:
        """Waiting requests become active while there is room; those whose prompt a sibling is about to share wait for it."""
        for request in list(self._waiting):
            if len(self._active) == self._max_active:
                break
            sharing = [each for each in request.siblings if each.sequence is not None] if self._can_fork else []
            if sharing and sharing[0].num_cached < request.num_shared_tokens:
                continue
            # First: when it fails, the request still waits.
            request.sequence = self._engine.fork(sharing[0].sequence) if sharing else self._engine.open()
            if sharing:
                request.num_cached = request.num_shared_tokens
                self._engine.truncate(request.sequence, request.num_cached)
            self._waiting.remove(request)
            self._active.append(request)
            if self._drafter:
                self._drafter.start(request.id, request.context)

    def _chunks(self) -> list[list[int]]:
        """Per active request, the committed ids that go into this pass; every request gets at least one row."""
        free = self._max_rows - len(self._active)
        chunks = []
        for request in self._active:
            chunk = request.context[request.num_cached : request.num_cached + 1 + free]
            free -= len(chunk) - 1
            chunks.append(chunk)
        return chunks

    def _draft(self, chunks: list[list[int]]) -> list[Draft]:
        """Per active request, as much of a draft as pays; empty where it could not be used."""
        drafts = [NO_DRAFT] * len(chunks)
        if self._drafter is None:
            return drafts
        num_committed = sum(map(len, chunks))
        free = self._max_rows - num_committed
        num_emitting = 0
        indices: list[int] = []
        batch: list[DraftRequest] = []
        for index, (request, chunk) in enumerate(zip(self._active, chunks, strict=True)):
            if request.reaches_end(chunk):
                num_emitting += 1
                # The verifier itself gives one id, so no draft token lies beyond max_tokens or the context limit.
                limit = min(self._max_draft_len, free, request.stop.remaining - 1)
                if limit > 0:
                    indices.append(index)
                    batch.append(DraftRequest(request.id, request.context, limit, request.sampler))
        if not batch:
            return drafts
        proposed = self._drafter.propose(batch)
        for asked, draft in zip(batch, proposed, strict=True):
            if len(draft) > asked.limit or draft.parents is not None:
                name = type(self._drafter).__name__
                raise ValueError(f"{name} proposed {draft.ids}, not a chain of at most {asked.limit} tokens")
        lengths = self._draft_lengths.choose(proposed, num_committed, num_emitting, free)
        for index, draft, length in zip(indices, proposed, lengths, strict=True):
            drafts[index] = draft.first(length)
        return drafts

    def _commit(self, request: Request, chunk: list[int], draft: Draft, acceptance: Acceptance) -> None:
        emitted, num_accepted_tokens = request.commit(chunk, acceptance)
        for metrics in (request.metrics, self.stats):
            metrics.count(len(draft), num_accepted_tokens, len(emitted))
        if self._drafter and request.finish_reason is None:
            self._drafter.observe(request.id, emitted, num_accepted_tokens)
