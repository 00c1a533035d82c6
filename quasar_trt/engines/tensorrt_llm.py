"""The engine of TensorRT-LLM's executor, which samples and accepts by itself.

A draft is verified by a request of its own: the executor runs the tokens and the draft once, gives what it accepted and one
token more, and ends the request. The next one brings the longer prefix, whose keys and values the executor still has
(block reuse). Without a draft a request generates on its own until the sequence ends; each pass hands out its next token, and
whoever brings a draft, rolls back or closes the sequence cancels it. So a sequence without drafts is one request.

Acceptance is exact: see `executor_requests`. Row invariance holds up to rounding only. Not executed yet: see
docs/tensorrt-llm.md.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np

from quasar_trt.communicator import Communicator
from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Accept, Acceptance, Capabilities, Engine, SequenceStep
from quasar_trt.engines.executor_requests import ExecutorRequests, check_params, needs_draft, room
from quasar_trt.engines.executor_session import ExecutorSession
from quasar_trt.engines.sequence_sampling import SequenceSampling
from quasar_trt.errors import QuasarError
from quasar_trt.sampling import check_maximum
from quasar_trt.sampling_params import SamplingParams

_PATIENCE = timedelta(seconds=0.2)  # of one wait for the executor, so that Ctrl-C is heard
_WORTHLESS = Draft((0,))  # verified where there has to be a draft and is none


@dataclass
class _Flight:
    """A request that the executor works on.

    start: tokens of its context; draft: what it verifies, empty where it generates; most: tokens that count.
    tokens: generated so far; rows: the logits [vocab] float32 of those that may still be asked for.
    """

    request: object
    start: int
    draft: Draft
    most: int
    id: int = -1
    tokens: list[int] = field(default_factory=list)
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    reason: object = None  # why it has ended
    error: str | None = None

    @property
    def ended(self) -> bool:
        return self.reason is not None or self.error is not None

    def goes_on(self, position: int) -> bool:
        """Whether it has generated the token at `position`, or will."""
        return not self.ended or position - self.start < len(self.tokens)

    def is_ready(self, position: int) -> bool:
        return self.ended or (not self.draft and position - self.start < len(self.tokens))


@dataclass
class _Sequence:
    """ids: what counts as cached. flight: the request that generates behind it."""

    sampling: SequenceSampling
    ids: list[int] = field(default_factory=list)
    flight: _Flight | None = None


class TensorRTLLMEngine(Engine):
    """See `Engine`. The passes of a batch run together: a long prompt holds up the tokens of its neighbours. To be started."""

    cache_capacity = 0  # the executor takes its memory when it starts, so nobody can ask for less

    def __init__(self, session: ExecutorSession):
        limits = session.limits
        self.config = session.config
        self.max_seq_len = limits.max_seq_len
        self.weight_bytes_per_step = session.weight_bytes_per_step
        self.capabilities = Capabilities(
            max_rows=limits.max_batch_size * limits.max_seq_len,  # the executor shares them out itself
            accepts_inside=True,
            tree=False,
            hidden_states=False,
            fork=False,
            exact=False,
            max_draft_len=limits.max_draft_len,
        )
        self._session = session
        self._bindings = session.bindings
        self._executor = None
        self._requests = ExecutorRequests(session.bindings, self.config.vocab_size, session.padded_vocab_size)
        self._greedy = SequenceSampling(SamplingParams(temperature=0.0), lambda position: 0, 0, limits.max_seq_len + 1)
        self._sequences: dict[int, _Sequence] = {}
        self._flights: dict[int, _Flight] = {}  # that have not ended, by the executor's id
        self._handles = itertools.count()

    @classmethod
    def from_dir(cls, engine_dir: Path, ranks: Communicator | None = None) -> TensorRTLLMEngine:
        """Started, but for several ranks, which are to `join`. Raises QuasarError as `ExecutorSession` and its `start` do."""
        engine = cls(ExecutorSession(Path(engine_dir), ranks))
        if ranks is None:
            engine.start()
        return engine

    def join(self, ranks: Communicator) -> None:
        try:
            self.start()
        except QuasarError as error:  # of this rank alone, while the others wait for it
            ranks.fail(str(error))

    def start(self) -> None:
        """Raises QuasarError as `ExecutorSession.start` does."""
        self._executor = self._session.start()
        weakref.finalize(self, self._executor.shutdown)  # ends those of other ranks too

    def open(self) -> int:
        handle = next(self._handles)
        self._sequences[handle] = _Sequence(self._greedy)
        return handle

    def sample_as(self, sequence: int, sampling: SequenceSampling) -> None:
        self._sequence(sequence).sampling = sampling

    def fork(self, sequence: int) -> int:
        raise ValueError(f"sequence {sequence} cannot be shared: the executor reuses common prefixes by itself")

    def close(self, sequence: int) -> None:
        self._leave(self._sequence(sequence))
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        return len(self._sequence(sequence).ids)

    def truncate(self, sequence: int, length: int) -> None:
        ids = self._sequence(sequence).ids
        if not 0 <= length <= len(ids):
            raise ValueError(f"cannot truncate sequence {sequence} to {length} tokens; it holds {len(ids)}")
        del ids[length:]

    @property
    def cache_bytes(self) -> int:
        """0, as `growth` and `bytes_of`: keys and values are the executor's own affair."""
        return 0

    def growth(self, sequence: int, count: int) -> int:
        return 0

    def bytes_of(self, num_tokens: int) -> int:
        return 0

    def check_params(self, params: SamplingParams) -> None:
        check_params(self._bindings, params)

    def step(self, batch: Sequence[SequenceStep], accept: Accept) -> list[Acceptance | None]:
        self.check(batch)
        flights: list[_Flight | None] = []
        new: list[_Flight] = []
        try:
            for entry in batch:
                flight = self._continued(entry)
                if flight is None and entry.needs_logits:
                    flight = self._prepare(entry)
                    new.append(flight)
                flights.append(flight)
            self._launch(new)
            for entry, flight in zip(batch, flights, strict=True):
                while flight and not flight.is_ready(self._end(entry)):
                    self._receive()
        except BaseException:
            for flight in new:
                self._cancel(flight)
            raise
        return [self._commit(entry, flight) for entry, flight in zip(batch, flights, strict=True)]

    def _end(self, entry: SequenceStep) -> int:
        """Tokens of the sequence once the committed ones have entered it."""
        return len(self._sequence(entry.sequence).ids) + len(entry.tokens)

    def _continued(self, entry: SequenceStep) -> _Flight | None:
        """The request that generates the entry's next token already; one that generates something else is left."""
        sequence = self._sequence(entry.sequence)
        flight = sequence.flight
        if flight is None:
            return None
        first, end = len(sequence.ids) - flight.start, self._end(entry)
        known = first >= 0 and flight.tokens[first : end - flight.start] == list(entry.tokens)
        if known and entry.needs_logits and not entry.draft and flight.goes_on(end):
            return flight
        self._leave(sequence)
        return None

    def _prepare(self, entry: SequenceStep) -> _Flight:
        sequence = self._sequence(entry.sequence)
        context = [*sequence.ids, *entry.tokens]
        most = room(len(context), sequence.sampling)
        draft = entry.draft.first(min(len(entry.draft), most - 1))
        if not draft and needs_draft(sequence.sampling.params):
            draft, most = _WORTHLESS, 1
        return _Flight(self._requests.make(context, sequence.sampling, draft), len(context), draft, most)

    def _launch(self, flights: Sequence[_Flight]) -> None:
        if not flights:
            return
        ids = self._executor.enqueue_requests([flight.request for flight in flights])
        for flight, flight.id in zip(flights, ids, strict=True):
            self._flights[flight.id] = flight

    def _receive(self) -> None:
        """Takes what the executor has ready, also for other sequences; what is left of cancelled requests is dropped."""
        for response in self._executor.await_responses(_PATIENCE):
            flight = self._flights.get(response.request_id)
            if flight is None:
                continue
            if response.has_error():
                flight.error = f"TensorRT-LLM: {' '.join(response.error_msg.split())}"
            else:
                self._take(flight, response.result)
            if flight.ended:
                del self._flights[flight.id]

    def _take(self, flight: _Flight, result) -> None:
        tokens = list(result.output_token_ids[0])
        if result.generation_logits is not None:  # [1, tokens, vocab] where it verified, else [tokens, 1, vocab]
            logits = result.generation_logits.float().reshape(-1, result.generation_logits.shape[-1])
            rows = logits[: len(tokens), : self.config.vocab_size].numpy()
            flight.rows.update(enumerate(rows, len(flight.tokens)))
        flight.tokens += tokens
        if result.is_final:
            flight.reason = result.finish_reasons[0]
            end_id = flight.request.end_id
            if self._met_end(flight) and flight.tokens[-1:] != [end_id]:
                flight.tokens.append(end_id)

    def _met_end(self, flight: _Flight) -> bool:
        return flight.reason == self._bindings.FinishReason.END_ID

    def _commit(self, entry: SequenceStep, flight: _Flight | None) -> Acceptance | None:
        sequence = self._sequence(entry.sequence)
        sequence.ids += entry.tokens
        if flight is None:
            return None
        first = len(sequence.ids) - flight.start
        emitted = flight.tokens[first : first + (flight.most if flight.draft else 1)]
        if flight.error or not emitted:
            reason = flight.error or f"TensorRT-LLM ended the request without a token ({flight.reason})"
            return Acceptance((), 0, error=reason)
        logits = None
        if sequence.sampling.params.logprobs is not None:
            rows = [flight.rows.get(first + index) for index in range(len(emitted))]
            try:
                logits = _checked(rows)
            except QuasarError as error:
                return Acceptance((), 0, error=str(error))
            flight.rows.pop(first - 1, None)  # only the last pass may be repeated
        num_accepted_tokens = 0
        if flight.draft:
            matches = [token == drafted for token, drafted in zip(emitted, entry.draft.ids, strict=False)]
            num_accepted_tokens = (*matches, False).index(False)
            if not self._met_end(flight):  # otherwise the last one may be a draft token
                num_accepted_tokens = min(num_accepted_tokens, len(emitted) - 1)
            sequence.ids += emitted[:num_accepted_tokens]
        else:
            sequence.flight = flight
        return Acceptance(tuple(emitted), num_accepted_tokens, logits=logits)

    def _leave(self, sequence: _Sequence) -> None:
        if sequence.flight is not None:
            self._cancel(sequence.flight)
            sequence.flight = None

    def _cancel(self, flight: _Flight) -> None:
        if self._flights.pop(flight.id, None) is not None:
            self._executor.cancel_request(flight.id)

    def _sequence(self, sequence: int) -> _Sequence:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise ValueError(f"sequence {sequence} is not open") from None


def _checked(rows: Sequence[np.ndarray | None]) -> np.ndarray:
    """[rows, vocab] float32. Raises QuasarError where one is missing or no distribution."""
    if any(row is None for row in rows):
        raise QuasarError("TensorRT-LLM gave no logits of an emitted token")
    for row in rows:
        check_maximum(float(row.max()))
    return np.stack(rows)
