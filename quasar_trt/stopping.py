"""When a request is finished. One object per request decides, fed with every emitted token in turn."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.sampling_params import SamplingParams

STOP = "stop"
LENGTH = "length"


class StopChecker:
    """Looks at every emitted token: end-of-sequence ids, stop ids, stop texts, max_tokens and the context limit, in this order.

    eos_token_ids: the model's end-of-sequence ids; params.ignore_eos switches them off.
    room: tokens that still fit into the context, at least 1.
    detokenizer: fed with the tokens that have text; needed where there are stop texts.
    end_token_ids: every id that may end the request; none of them is emitted before min_tokens.
    stop_token_ids: those that do.
    remaining: the most tokens that are still to come.
    finish_reason: None while the request goes on, then "stop" or "length".
    stop_reason: what ended it, as vLLM reports it: the stop text or id, None for the first of `eos_token_ids` (the model's own).
    ends_with_id: the request ended with an id whose text is left out.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        room: int,
        detokenizer: Detokenizer | None = None,
    ):
        self.detokenizer = detokenizer
        self.end_token_ids = tuple(dict.fromkeys((*eos_token_ids, *params.stop_token_ids)))
        self.remaining = room if params.max_tokens is None else min(params.max_tokens, room)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.ends_with_id = False
        self._params = params
        self._own = () if params.ignore_eos else tuple(eos_token_ids)
        self.stop_token_ids = (*self._own, *params.stop_token_ids)
        self._stopping = set(self.stop_token_ids)
        self._num_emitted = 0

    def ahead(self) -> StopChecker:
        """One that decides alike and leaves this one as it is."""
        other = copy.copy(self)
        other.detokenizer = self.detokenizer.copy() if self._params.stop else None
        return other

    def emit(self, token: int) -> bool:
        """Takes one emitted token; True when the request ends with it."""
        self.remaining -= 1
        self._num_emitted += 1
        early = self._num_emitted <= self._params.min_tokens
        if token in self._stopping and not early:
            self.finish_reason = STOP
            self.stop_reason = None if token in self._own[:1] else token
            self.ends_with_id = not self._params.include_stop_str_in_output
        if self.detokenizer and not self.ends_with_id:
            num_new = self.detokenizer.push(token)
            stop = None if early or self.finish_reason else self.detokenizer.find_stop(num_new)
            if stop is not None:
                self.finish_reason, self.stop_reason = STOP, stop
        if self.finish_reason is None and self.remaining == 0:
            self.finish_reason = LENGTH
        if self.finish_reason and self.detokenizer:
            self.detokenizer.end()
        return self.finish_reason is not None
