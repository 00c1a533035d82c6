"""One completion on its way through a runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.sequence_sampling import SequenceSampling
from quasar_trt.errors import QuasarError
from quasar_trt.logits_processors import LogitsProcessors
from quasar_trt.logprobs import TokenLogprobs, token_logprobs
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.rejection import accept
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.service_metrics import ServiceMetrics
from quasar_trt.stopping import StopChecker

ABORT = "abort"
ERROR = "error"
TIMEOUT = "timeout"

# Where an emitted token came from; PLAIN: nothing was drafted.
ACCEPTED, RECOVERED, BONUS, PLAIN = "accepted", "recovered", "bonus", "plain"


class Request:
    """Prompt, emitted ids and everything that decides the next one.

    sample_index: which of the prompt's completions this is. The first alone scores the prompt, where that is asked for.
    detokenizer: where text is needed as the tokens come: for stop texts and for streams.
    bad_words: the ids of each bad word.
    timeout: seconds after which a pass that begins finds the request ended, waiting included; None for no limit.
    drafts: whether the drafter may propose for it.

    context: prompt and emitted ids; the drafter reads this very list.
    sampling: what an engine that accepts inside has to know of it.
    siblings: the requests for all completions of the prompt, this one included.
    submitted_at: by perf_counter, when the scheduler got it; arrival: its place among all that the scheduler got.
    emitted_at: by perf_counter, when it emitted last; None before the first token.
    sequence: the engine's handle while the request is active, else None.
    num_cached: ids of the context whose rows are in the engine's cache.
    logprobs, prompt_logprobs: one entry per emitted token, and per token of the prompt but the first; empty unless asked for.
    origins: of each emitted token: ACCEPTED, RECOVERED, BONUS or PLAIN.
    text_offsets: characters of the text before each emitted token; empty without a detokenizer.
    """

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        max_seq_len: int,
        *,
        sample_index: int = 0,
        detokenizer: Detokenizer | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        timeout: float | None = None,
        drafts: bool = True,
    ):
        self.id = request_id
        self.prompt = prompt
        self.params = params
        self.sample_index = sample_index
        self.context = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.context)
        self.stop = StopChecker(params, eos_token_ids, max_seq_len - self.num_prompt_tokens, detokenizer)
        processors = LogitsProcessors.for_request(params, self.context, self.stop.end_token_ids, bad_words)
        self.sampler = Sampler(params, sample_index, processors)
        self.sampling = SequenceSampling(
            params,
            self.sampler.seed,
            self.num_prompt_tokens,
            self.num_prompt_tokens + self.stop.remaining,
            self.stop.end_token_ids,
            self.stop.stop_token_ids,
            bad_words,
        )
        self.timeout = timeout
        self.drafts = drafts
        self.metrics = SpeculationMetrics()
        self.service = ServiceMetrics()
        self.siblings: Sequence[Request] = (self,)
        self.submitted_at = 0.0
        self.arrival = 0
        self.known_to_drafter = False
        self.emitted_at: float | None = None
        self.sequence: int | None = None
        self.num_cached = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.origins: list[str] = []
        self.text_offsets: list[int] = []
        self._ended: tuple[str | None, str | None] = None, None  # reason and error, where its tokens did not end it
        self._scores_prompt = params.prompt_logprobs is not None and sample_index == 0
        # Of the pass that was accepted last and is not committed yet.
        self._new_logprobs: list[TokenLogprobs] = []
        self._new_prompt_logprobs: list[TokenLogprobs] = []

    @property
    def token_ids(self) -> list[int]:
        """Emitted ids so far."""
        return self.context[self.num_prompt_tokens :]

    @property
    def finish_reason(self) -> str | None:
        return self._ended[0] or self.stop.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self._ended[1] if self._ended[0] else self.stop.stop_reason

    @property
    def error(self) -> str | None:
        """Why the request failed."""
        return self._ended[1]

    @property
    def num_pending(self) -> int:
        """Committed ids that are not in the cache yet."""
        return len(self.context) - self.num_cached

    @property
    def wants_whole_prompt(self) -> bool:
        """Whether rows of the prompt are still to be scored, so that none can be taken from another sequence."""
        return self._scores_prompt and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends the request for another reason than its tokens."""
        self._ended = reason, error
        if self.stop.detokenizer:
            self.stop.detokenizer.end()

    def lose_cache(self) -> None:
        """Everything is to be computed again but what the request has emitted and scored."""
        self.sequence = None
        self.num_cached = 0
        self.service.num_preemptions += 1

    def chunk(self, most: int) -> list[int]:
        """Up to `most` of the pending ids, the next ones. Rows that were scored before come apart from those that were not."""
        if self.wants_whole_prompt and (num_scored := len(self.prompt_logprobs) - self.num_cached) > 0:
            most = min(most, num_scored)
        return self.context[self.num_cached : self.num_cached + most]

    def reaches_end(self, chunk: Sequence[int]) -> bool:
        """Whether the cache will hold the whole context once `chunk` has entered it."""
        return self.num_cached + len(chunk) == len(self.context)

    def step(self, chunk: Sequence[int], draft: Draft) -> SequenceStep:
        """The request's part of a pass. A prompt that is scored comes in as a draft, so that all of its rows come back."""
        if self._is_scoring:
            return SequenceStep(self.sequence, chunk[:1], draft.after(chunk[1:]))
        return SequenceStep(self.sequence, chunk, draft, needs_logits=self.reaches_end(chunk))

    def accept(self, logits: np.ndarray, chunk: Sequence[int], draft: Draft) -> Acceptance:
        """Acceptance of what `step` gave for the same chunk and draft, from its rows of logits.

        A row of the chunk that is no distribution ends this request alone.
        """
        first = self._num_scored(chunk)
        try:
            self._new_prompt_logprobs = self._score_prompt(logits) if self._is_scoring else []
            if not self.reaches_end(chunk):
                return Acceptance((), first)
            finishes = self.stop.ahead().emit
            acceptance = accept(logits[first:], draft, self.sampler, len(self.context), finishes)
        except QuasarError as error:
            self.end(ERROR, str(error))
            return Acceptance((), 0)
        if self.params.logprobs is not None:
            self._score(acceptance.emitted, [logits[first + row] for row in acceptance.rows])
        return acceptance.after(first)

    def advance(self, chunk: Sequence[int]) -> None:
        """The cache holds a chunk of the prompt that is not its last."""
        self._commit_prompt_logprobs()
        self.num_cached += len(chunk)

    def commit(self, chunk: Sequence[int], draft: Draft, acceptance: Acceptance) -> tuple[list[int], int]:
        """Appends what was emitted, up to the id that finishes the request.

        Returns what was appended, and how many of its ids were draft tokens.
        """
        if acceptance.error is not None:
            self.end(ERROR, acceptance.error)
        if acceptance.logits is not None:
            self._score(acceptance.emitted, acceptance.logits)
        num_scored = self._num_scored(chunk)
        num_accepted_tokens = max(acceptance.num_accepted_tokens - num_scored, 0)
        last = acceptance.path[-1] - num_scored if acceptance.path else num_accepted_tokens - 1
        self._commit_prompt_logprobs()
        before = len(self.context)
        detokenizer = self.stop.detokenizer
        for index, token in enumerate(acceptance.emitted):
            self.context.append(token)
            self.origins.append(ACCEPTED if index < num_accepted_tokens else _last_origin(last, draft))
            if detokenizer:
                self.text_offsets.append(len(detokenizer.text))
            if self.stop.emit(token):
                break
        self.num_cached = before + num_accepted_tokens
        emitted = self.context[before:]
        self.logprobs += self._new_logprobs[: len(emitted)]
        return emitted, min(num_accepted_tokens, len(emitted))

    @property
    def _is_scoring(self) -> bool:
        return self.wants_whole_prompt and self.num_cached == len(self.prompt_logprobs)

    def _num_scored(self, chunk: Sequence[int]) -> int:
        """Rows of the chunk before its last one that come back, because the prompt is scored."""
        return len(chunk) - 1 if self._is_scoring else 0

    def _score(self, emitted: Sequence[int], logits: Sequence[np.ndarray]) -> None:
        rows = zip(logits, emitted, strict=False)
        self._new_logprobs = [token_logprobs(row, token, self.params.logprobs) for row, token in rows]

    def _score_prompt(self, logits: np.ndarray) -> list[TokenLogprobs]:
        rows = zip(logits, self.context[self.num_cached + 1 : self.num_prompt_tokens], strict=False)
        return [token_logprobs(row, token, self.params.prompt_logprobs) for row, token in rows]

    def _commit_prompt_logprobs(self) -> None:
        self.prompt_logprobs += self._new_prompt_logprobs
        self._new_prompt_logprobs = []


def _last_origin(last: int, draft: Draft) -> str:
    """Of the token that a pass emits besides those that it accepted, the last of which is draft token `last`, -1 for none."""
    if not draft.ids:
        return PLAIN
    return RECOVERED if draft.children(last) else BONUS
