"""Who waits, who is active, and what each brings into the next pass, within the memory there is for keys and values."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter
from time import perf_counter

from quasar_trt.drafters.base import Drafter
from quasar_trt.engines.base import Engine
from quasar_trt.kv_budget import KvBudget
from quasar_trt.prefix_cache import PrefixCache, common_prefix
from quasar_trt.prompt_chunks import PromptChunks
from quasar_trt.request import TIMEOUT, Request
from quasar_trt.service_metrics import Load, ServiceMetrics

_by_arrival = attrgetter("arrival")


class Roster:
    """Requests in the order of their arrival: whoever came first is admitted first, is served first, and is preempted last.

    active: by arrival. prefixes: finished sequences that later requests may begin with; they give way to active ones.
    service: metrics over all requests so far.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        max_batch_size: int,
        kv_budget: KvBudget,
        prompt_chunks: PromptChunks,
    ):
        self.active: list[Request] = []
        self.service = ServiceMetrics()
        self._waiting: list[Request] = []
        self._engine = engine
        self._drafter = drafter
        self._can_fork = engine.capabilities.fork
        self.prefixes = PrefixCache(engine, max_batch_size if self._can_fork else 0)
        self._max_active = min(max_batch_size, engine.capabilities.max_rows)  # each may need a row in every pass
        self._kv_budget = kv_budget
        self._prompt_chunks = prompt_chunks
        self._num_submitted = 0

    @property
    def load(self) -> Load:
        """What is there now."""
        return Load(
            num_waiting=len(self._waiting),
            num_running=len(self.active),
            num_kept=len(self.prefixes),
            kv_bytes=self._engine.cache_bytes,
            kv_limit=self._kv_budget.num_bytes,
        )

    def submit(self, request: Request) -> None:
        """Puts a request behind those that wait."""
        request.submitted_at = perf_counter()
        request.arrival = self._num_submitted
        self._num_submitted += 1
        self._waiting.append(request)

    def release(self, requests: Sequence[Request]) -> None:
        """Takes requests out, finished or not, and frees what they hold; those already out are left alone."""
        for request in requests:
            sequence = request.sequence
            if sequence is not None:
                self.active.remove(request)
                request.sequence = None
                if request.error:
                    self._engine.close(sequence)
                else:
                    self.prefixes.keep(sequence, request.context)
            elif request in self._waiting:
                self._waiting.remove(request)
            else:
                continue
            self.service.num_finished += 1
            if request.known_to_drafter:
                self._drafter.stop(request.id)

    def expire(self) -> None:
        """Ends and releases requests whose time is over."""
        now = perf_counter()
        late = [
            request
            for request in (*self.active, *self._waiting)
            if request.timeout is not None and now - request.submitted_at >= request.timeout
        ]
        for request in late:
            request.end(TIMEOUT)
        self.release(late)

    def admit(self) -> None:
        """Waiting requests become active, in order, while all that they will bring into the cache fits.

        One that begins as an active request does, where that has not computed their common prefix yet, waits for it and lets
        others pass.
        """
        for request in list(self._waiting):
            if len(self.active) == self._max_active:
                break
            source, num_shared, ready = self._longest_prefix(request)
            if not ready:
                continue
            sequence = self._begin(source)  # before anything changes: when it fails, the request still waits
            if sequence is None:
                break
            if source is not None:
                self._engine.truncate(sequence, num_shared)
            pending = [(each.sequence, each.num_pending) for each in self.active]
            if not self._make_room(rows=[*pending, (sequence, len(request.context) - num_shared)]):
                self._engine.close(sequence)
                break
            self._engine.sample_as(sequence, request.sampling)
            request.sequence, request.num_cached = sequence, num_shared
            self._waiting.remove(request)
            insort(self.active, request, key=_by_arrival)
            for metrics in (request.service, self.service):
                metrics.num_reused_tokens += num_shared
            if self._drafter and request.drafts and not request.known_to_drafter:
                request.known_to_drafter = True
                self._drafter.start(request.id, request.context)

    def _begin(self, source: int | None) -> int | None:
        """A new sequence, or one that begins as `source`; None where there is no room. A kept source is taken over where there
        is no room for another one beside it."""
        if self._engine.open_bytes > self._kv_budget.free and self.prefixes.take(source):
            return source
        if not self._make_room(self._engine.open_bytes):
            return None
        return self._engine.open() if source is None else self._engine.fork(source)

    def _longest_prefix(self, request: Request) -> tuple[int | None, int, bool]:
        """(sequence, tokens, whether it has computed them) of what shares most with a request; (None, 0, True) for none."""
        if not self._can_fork or request.wants_whole_prompt:
            return None, 0, True
        ids = request.context[:-1]  # the last one's row of logits is the request's own
        (source, longest), ready = self.prefixes.find(ids), True
        for each in self.active:
            length = common_prefix(each.context, ids)
            if each.num_pending == 1:  # what it emits next is not worth waiting for
                length = min(length, each.num_cached)
            if length > longest and (length >= self.prefixes.min_length or each in request.siblings):
                source, longest, ready = each.sequence, length, length <= each.num_cached
        return source, longest, ready

    def plan(self) -> tuple[list[Request], list[list[int]]]:
        """The requests of the next pass, and the committed ids that each brings into it.

        Where they do not fit, the request that arrived last loses its cache and waits again, behind those that arrived
        before it.
        """
        while True:
            requests, chunks = self._share_rows()
            rows = [(request.sequence, len(chunk)) for request, chunk in zip(requests, chunks, strict=True)]
            if self._make_room(rows=rows):
                return requests, chunks
            self._preempt(self.active[-1])

    def _share_rows(self) -> tuple[list[Request], list[list[int]]]:
        """Requests that decode have their row in any case; of what prompts may take, the oldest takes first."""
        num_decoding = sum(request.num_pending == 1 for request in self.active)
        free = self._prompt_chunks.most_rows(num_decoding)
        requests, chunks = [], []
        for request in self.active:
            decodes = request.num_pending == 1
            chunk = request.chunk(1 if decodes else free)
            if not decodes:
                free -= len(chunk)
            if chunk:
                requests.append(request)
                chunks.append(chunk)
        return requests, chunks

    def _make_room(self, num_bytes: int = 0, rows: Sequence[tuple[int, int]] = ()) -> bool:
        """Whether so many bytes and so many more tokens of each sequence fit, once kept sequences have given way."""
        while num_bytes + self._kv_budget.growth(rows) > self._kv_budget.free:
            if not self.prefixes.drop():
                return False
        return True

    def _preempt(self, request: Request) -> None:
        sequence = request.sequence
        request.lose_cache()
        self.active.remove(request)
        insort(self._waiting, request, key=_by_arrival)
        self._engine.close(sequence)
        if request.known_to_drafter:
            self._drafter.pause(request.id)
        self.service.num_preemptions += 1
