"""The speculative loop: draft -> verify -> accept -> commit -> roll back, many requests at once.

Requests are independent rows of one pass; they join and leave between passes. A prompt enters the cache in chunks; its
last chunk already carries a draft. Tokens depend on the request alone, so it does not matter who its neighbours are, how its
prompt was cut, whose prefix it shares or whether it lost its cache on the way. Token ids only, no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from quasar_trt.draft_length import DraftLengths
from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep
from quasar_trt.errors import QuasarError
from quasar_trt.kv_budget import KvBudget
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.prompt_chunks import PromptChunks
from quasar_trt.request import ABORT, Request
from quasar_trt.roster import Roster
from quasar_trt.service_metrics import Load, ServiceMetrics
from quasar_trt.step_cost import StepCost


class Scheduler:
    """Advances requests over one engine and at most one drafter.

    max_batch_size: requests per pass; further ones wait and join as others finish.
    max_draft_len: the most draft tokens per request and pass.
    kv_budget: the memory of all caches; where it runs out, the request that arrived last loses its cache and waits.
    step_cost: by which draft lengths and chunks of prompts are chosen; None takes all that there are rows for.
    stats: metrics over all requests so far.

    Raises QuasarError for limits that leave nothing to do, when the drafter may propose more than max_draft_len, and for a drafter
    that reads logits of an engine that gives none.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        max_batch_size: int,
        max_draft_len: int,
        kv_budget: KvBudget,
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
        if drafter and drafter.reads_logits and engine.capabilities.accepts_inside:
            raise QuasarError(
                f"{type(drafter).__name__} learns from the verifier's logits, and {type(engine).__name__} samples by itself and gives "
                "none; choose a drafter that needs none, such as suffix"
            )
        self.stats = SpeculationMetrics()
        self._engine = engine
        self._drafter = drafter
        self._reads_logits = drafter is not None and drafter.reads_logits
        self._hidden_layers = drafter.hidden_layers if drafter else ()
        self._tree = engine.capabilities.tree
        self._max_rows = engine.capabilities.max_rows
        self._max_draft_len = max_draft_len if wanted is None else wanted
        self._kv_budget = kv_budget
        self._step_cost = step_cost
        self._draft_lengths = DraftLengths(step_cost)
        self._prompt_chunks = PromptChunks(step_cost, self._max_rows)
        self._roster = Roster(engine, drafter, max_batch_size, kv_budget, self._prompt_chunks)

    @property
    def service(self) -> ServiceMetrics:
        """Metrics over all requests so far."""
        return self._roster.service

    @property
    def load(self) -> Load:
        """What is there now."""
        return self._roster.load

    def submit(self, request: Request) -> None:
        """Puts a request behind those that wait; it leaves when it is finished or aborted."""
        self._roster.submit(request)

    def abort(self, requests: Sequence[Request]) -> None:
        """Ends those that go on, and frees what any of them still holds."""
        for request in requests:
            if request.finish_reason is None:
                request.end(ABORT)
        self._roster.release(requests)

    def forget_prefixes(self) -> None:
        """Frees what finished requests left for later ones that begin alike."""
        self._roster.prefixes.clear()
        if self._drafter:
            self._drafter.forget_prefixes()

    def step(self) -> None:
        """Advances the active requests by one pass, once those that wait have joined them as far as there is room.

        Whatever interrupts it, each request stays as it was before the pass or as it is after it.
        """
        self._roster.expire()
        self._roster.admit()
        requests, chunks = self._roster.plan()
        try:
            if requests:
                self._advance(requests, chunks)
        except BaseException:
            for request in requests:
                if self._engine.length(request.sequence) > request.num_cached:
                    self._engine.truncate(request.sequence, request.num_cached)
            raise
        finally:
            self._roster.release([request for request in self._roster.active if request.finish_reason is not None])

    def _advance(self, requests: list[Request], chunks: list[list[int]]) -> None:
        accept_seconds = read_seconds = 0.0

        started = perf_counter()
        drafts = self._draft(requests, chunks)
        drafted = perf_counter()

        def accept(index: int, logits: np.ndarray) -> Acceptance:
            nonlocal accept_seconds, read_seconds
            began = perf_counter()
            request, draft = requests[index], drafts[index]
            acceptance = request.accept(logits, chunks[index], draft)
            accepted = perf_counter()
            accept_seconds += accepted - began
            reads = self._reads_logits and request.known_to_drafter and request.reaches_end(chunks[index])
            if reads and request.finish_reason is None:
                self._drafter.read(request.id, draft, logits[-1 - len(draft) :])  # behind those of a scored prompt
                read_seconds += perf_counter() - accepted
            return acceptance

        batch = [request.step(chunk, draft) for request, chunk, draft in zip(requests, chunks, drafts, strict=True)]
        if self._engine.capabilities.hidden_states:
            self._engine.keep_hidden_states(self._hidden_layers)
        acceptances = self._engine.step(batch, accept)  # rolls its caches back to what was accepted
        verified = perf_counter()
        if self._hidden_layers:
            self._hand_states(requests, batch, acceptances)
        verify_seconds = verified - drafted - accept_seconds - read_seconds
        read_seconds += perf_counter() - verified
        seconds = (drafted - started + read_seconds, verify_seconds, accept_seconds)

        self.stats.add_seconds(*seconds)
        num_rows = sum(map(len, chunks)) + sum(map(len, drafts))
        self._prompt_chunks.observe(num_rows, sum(len(chunk) for chunk in chunks if len(chunk) > 1), seconds[1])
        if self._step_cost and all(len(chunk) == 1 for chunk in chunks):
            self._step_cost.observe(num_rows, seconds[1])
        for request, chunk, draft, acceptance in zip(requests, chunks, drafts, acceptances, strict=True):
            request.metrics.add_seconds(*seconds)
            if request.reaches_end(chunk):
                self._commit(request, chunk, draft, acceptance)
            else:
                request.advance(chunk)

    def _hand_states(
        self, requests: list[Request], batch: list[SequenceStep], acceptances: list[Acceptance | None]
    ) -> None:
        """The drafter reads the hidden states of the rows that stay in the caches."""
        for index, (request, entry, acceptance) in enumerate(zip(requests, batch, acceptances, strict=True)):
            if request.known_to_drafter and request.finish_reason is None:
                before = len(entry.tokens) - 1
                kept = acceptance.rows if acceptance else range(1)
                rows = [*range(before), *[before + row for row in kept]]
                self._drafter.read_states(request.id, request.num_cached, self._engine.hidden_states(index, rows))

    def _draft(self, requests: list[Request], chunks: list[list[int]]) -> list[Draft]:
        """Per request, as much of a draft as pays; empty where it could not be used."""
        drafts = [NO_DRAFT] * len(chunks)
        if self._drafter is None:
            return drafts
        num_committed = sum(map(len, chunks))
        free = self._max_rows - num_committed
        ends = [request.reaches_end(chunk) for request, chunk in zip(requests, chunks, strict=True)]
        most = free // max(sum(ends), 1) if self._drafter.draws else free
        rows = [(request.sequence, len(chunk)) for request, chunk in zip(requests, chunks, strict=True)]
        room = self._kv_budget.free - self._kv_budget.growth(rows)
        num_emitting = 0
        indices: list[int] = []
        batch: list[DraftRequest] = []
        for index, (request, chunk) in enumerate(zip(requests, chunks, strict=True)):
            if request.reaches_end(chunk):
                num_emitting += 1
                if not request.known_to_drafter:
                    continue
                # The verifier itself gives one id, so no draft token lies beyond max_tokens or the context limit.
                limit = min(self._max_draft_len, most, request.stop.remaining - 1)
                limit, room = self._kv_budget.fit_draft(*rows[index], limit, room)
                if limit > 0:
                    indices.append(index)
                    batch.append(
                        DraftRequest(request.id, request.context, limit, request.sampler, self._tree, request.stop)
                    )
        if not batch:
            return drafts
        proposed = self._drafter.propose(batch)
        for asked, draft in zip(batch, proposed, strict=True):
            if len(draft) > asked.limit or (draft.is_tree and not self._tree):
                name, kind = type(self._drafter).__name__, "tree" if self._tree else "chain"
                raise ValueError(f"{name} proposed {draft.ids}, not a {kind} of at most {asked.limit} tokens")
        lengths = self._draft_lengths.choose(proposed, num_committed, num_emitting, free, self._drafter.seconds)
        for index, draft, length in zip(indices, proposed, lengths, strict=True):
            drafts[index] = draft.first(length)
        return drafts

    def _commit(self, request: Request, chunk: list[int], draft: Draft, acceptance: Acceptance) -> None:
        emitted, num_accepted_tokens = request.commit(chunk, draft, acceptance)
        for metrics in (request.metrics, self.stats):
            metrics.count(len(draft), num_accepted_tokens, len(emitted))
        if emitted:
            now = perf_counter()
            for metrics in (request.service, self.service):
                metrics.count(len(emitted), now - request.submitted_at, request.emitted_at and now - request.emitted_at)
            request.emitted_at = now
        if request.known_to_drafter and request.finish_reason is None:
            self._drafter.observe(request.id, emitted, num_accepted_tokens)
