"""What a request's parameters do to a row of logits before temperature: bans, biases and penalties, in vLLM's order.

    allowed_token_ids, bad_words, min_tokens, logit_bias, the request's own callables, repetition_penalty,
    frequency_penalty, presence_penalty

Every row is processed as if the draft tokens before it were already emitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quasar_trt.errors import QuasarError
from quasar_trt.sampling_params import LogitsProcessor, SamplingParams
from quasar_trt.token_counts import TokenCounts

_CHANGING = (
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "logit_bias",
    "logits_processors",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_DEFAULT = SamplingParams()


class LogitsProcessors:
    """Processes the rows of one completion.

    context: prompt and emitted ids, the request's own growing list.
    end_token_ids: what may not be emitted before min_tokens.
    bad_words: the ids of each bad word.
    """

    def __init__(
        self,
        params: SamplingParams,
        context: Sequence[int],
        end_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ):
        self._params = params
        self._context = context
        self._num_prompt_tokens = len(context)
        self._end = np.array(end_token_ids, np.int64)
        self._bad_words = [tuple(word) for word in bad_words]
        self._longest_bad_word = max(map(len, self._bad_words), default=0)
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._biases = np.array(list(params.logit_bias.values()), np.float32)
        self._allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        self._emitted = TokenCounts() if params.frequency_penalty or params.presence_penalty else None
        self._all = TokenCounts() if params.repetition_penalty != 1.0 else None
        for token in context if self._all else ():
            self._all.push(token)
        self._num_counted = len(context)
        self._drafted: list[int] = []  # counted on top of the context

    @staticmethod
    def for_request(
        params: SamplingParams,
        context: Sequence[int],
        end_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> LogitsProcessors | None:
        """None when no parameter changes a row."""
        return LogitsProcessors(params, context, end_token_ids, bad_words) if _changing(params) else None

    def __call__(self, logits: np.ndarray, drafted: Sequence[int]) -> np.ndarray:
        """The processed row [vocab] float32, a fresh array.

        logits: the model's row [vocab] float32; drafted: the ids between the context and the row.

        Raises QuasarError when no token is left, or when one of the request's callables fails; a row without a finite
        maximum comes back as it is.
        """
        if not math.isfinite(logits.max()):
            return logits
        if self._allowed is None:
            row = logits.copy()
        else:
            row = np.full(len(logits), -np.inf, np.float32)
            row[self._allowed] = logits[self._allowed]
        num_emitted = len(self._context) - self._num_prompt_tokens + len(drafted)
        if self._bad_words:
            self._ban_words(row, drafted)
        if num_emitted < self._params.min_tokens:
            row[self._end] = -np.inf
        row[self._bias_ids] += self._biases
        for processor in self._params.logits_processors:
            row = _processed(processor, [*self._context[self._num_prompt_tokens :], *drafted], row)
        self._penalize(row, drafted)
        if not math.isfinite(row.max()):
            raise QuasarError(
                f"after {num_emitted} emitted tokens no token with a finite logit is left; "
                f"relax one of: {', '.join(_changing(self._params))}"
            )
        return row

    def _ban_words(self, row: np.ndarray, drafted: Sequence[int]) -> None:
        first = max(self._num_prompt_tokens, len(self._context) + len(drafted) + 1 - self._longest_bad_word)
        emitted = (*self._context[first:], *drafted[max(first - len(self._context), 0) :])
        for *start, last in self._bad_words:
            if len(start) <= len(emitted) and emitted[len(emitted) - len(start) :] == tuple(start):
                row[last] = -np.inf

    def _penalize(self, row: np.ndarray, drafted: Sequence[int]) -> None:
        if not (self._all or self._emitted):
            return
        self._count(drafted)
        if self._all:
            values, penalty = row[self._all.ids], np.float32(self._params.repetition_penalty)
            row[self._all.ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._emitted:
            row[self._emitted.ids] -= np.float32(self._params.frequency_penalty) * self._emitted.counts
            row[self._emitted.ids] -= np.float32(self._params.presence_penalty)

    def _count(self, drafted: Sequence[int]) -> None:
        """Brings the counts to the context followed by `drafted`; row after row of a block, that is one token each."""
        counts = [each for each in (self._all, self._emitted) if each]
        if self._num_counted < len(self._context) or list(drafted[: len(self._drafted)]) != self._drafted:
            while self._drafted:
                token = self._drafted.pop()
                for each in counts:
                    each.pop(token)
            for token in self._context[self._num_counted :]:
                for each in counts:
                    each.push(token)
            self._num_counted = len(self._context)
        for token in drafted[len(self._drafted) :]:
            self._drafted.append(token)
            for each in counts:
                each.push(token)


def _changing(params: SamplingParams) -> list[str]:
    """The parameters that change a row and are not at their default."""
    return [name for name in _CHANGING if getattr(params, name) != getattr(_DEFAULT, name)]


def _processed(processor: LogitsProcessor, emitted: list[int], row: np.ndarray) -> np.ndarray:
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        result = np.array(processor(emitted, row), np.float32)  # a copy: what it returns may be its own
    except Exception as error:  # whatever a caller's own function raises; it ends that request, not its neighbours
        raise QuasarError(f"logits processor {name} failed: {type(error).__name__}: {error}") from error
    if result.shape != row.shape:
        raise QuasarError(f"logits processor {name} returned an array of shape {result.shape}; allowed: {row.shape}")
    return result
