"""When a request is finished: end-of-sequence ids, max_tokens, the context limit. One object per request decides."""

from __future__ import annotations

from collections.abc import Sequence

from quasar_trt.sampling_params import SamplingParams

STOP = "stop"
LENGTH = "length"


class StopChecker:
    """Looks at every emitted token.

    eos_token_ids: the model's end-of-sequence ids; params.ignore_eos switches them off.
    room: tokens that still fit into the context, at least 1.
    finish_reason: None while the request goes on, then "stop" or "length".
    stop_reason: None for the first of `eos_token_ids` (the model's own), the id for any other, as vLLM reports it.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], room: int):
        self._eos = () if params.ignore_eos else tuple(eos_token_ids)
        self.remaining = min(params.max_tokens, room)
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None

    def finishes(self, token: int, num_before: int) -> bool:
        """Whether `token` would end the request if `num_before` more tokens were emitted before it."""
        return token in self._eos or num_before + 1 >= self.remaining

    def emit(self, token: int) -> bool:
        """Takes one emitted token; True when the request ends with it."""
        self.remaining -= 1
        if token in self._eos:
            self.finish_reason = STOP
            self.stop_reason = None if token == self._eos[0] else token
        elif self.remaining == 0:
            self.finish_reason = LENGTH
        return self.finish_reason is not None
