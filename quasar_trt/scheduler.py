"""The speculative loop: draft -> verify -> accept -> commit -> roll back, many requests at once.

Requests are independent rows of one pass. A prompt enters the cache in chunks; its last chunk already carries a draft.
Tokens depend on the request alone, so it does not matter who its neighbours are. Token ids only, no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest
from quasar_trt.engines.base import Acceptance, Engine
from quasar_trt.errors import QuasarError
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.request import Request


class Scheduler:
    """Advances requests over one engine and at most one drafter.

    max_batch_size: requests per pass; further ones wait and join as others finish.
    max_draft_len: the most draft tokens per request and pass.
    stats: metrics over all requests so far.

    Raises QuasarError for limits that leave nothing to do and when the drafter may propose more than max_draft_len.
    """

    def __init__(self, engine: Engine, drafter: Drafter | None, max_batch_size: int, max_draft_len: int):
        if max_batch_size < 1:
            raise QuasarError(f"max_batch_size is {max_batch_size}; allowed: 1 or more")
        if max_draft_len < 0:
            raise QuasarError(f"max_draft_len is {max_draft_len}; allowed: 0 (no drafts) or more")
        if drafter is not None and drafter.num_speculative_tokens > max_draft_len:
            raise QuasarError(
                f"num_speculative_tokens is {drafter.num_speculative_tokens}; allowed: at most {max_draft_len}, the "
                "engine's max_draft_len; ask for fewer or build with a larger --max-draft-len"
            )
        self.stats = SpeculationMetrics()
        self._engine = engine
        self._drafter = drafter
        self._can_fork = engine.capabilities.fork
        self._max_rows = engine.capabilities.max_rows
        self._max_active = min(max_batch_size, self._max_rows)  # each active request has a row in every pass
        self._max_draft_len = max_draft_len
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
        """Per active request, a draft for an equal share of the rows that are left; empty where it could not be used."""
        drafts = [NO_DRAFT] * len(chunks)
        if self._drafter is None:
            return drafts
        share = (self._max_rows - sum(map(len, chunks))) // len(chunks)
        indices: list[int] = []
        batch: list[DraftRequest] = []
        for index, (request, chunk) in enumerate(zip(self._active, chunks, strict=True)):
            # The verifier itself gives one id, so no draft token lies beyond max_tokens or the context limit.
            limit = min(self._max_draft_len, share, request.stop.remaining - 1)
            if limit > 0 and request.reaches_end(chunk):
                indices.append(index)
                batch.append(DraftRequest(request.id, request.context, limit, request.sampler))
        if not batch:
            return drafts
        for index, asked, draft in zip(indices, batch, self._drafter.propose(batch), strict=True):
            if len(draft) > asked.limit or draft.parents is not None:
                name = type(self._drafter).__name__
                raise ValueError(f"{name} proposed {draft.ids}, not a chain of at most {asked.limit} tokens")
            drafts[index] = draft
        return drafts

    def _commit(self, request: Request, chunk: list[int], draft: Draft, acceptance: Acceptance) -> None:
        emitted, num_accepted_tokens = request.commit(chunk, acceptance)
        for metrics in (request.metrics, self.stats):
            metrics.count(len(draft), num_accepted_tokens, len(emitted))
        if self._drafter and request.finish_reason is None:
            self._drafter.observe(request.id, emitted, num_accepted_tokens)
