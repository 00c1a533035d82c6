"""One request on its way through a runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance
from quasar_trt.errors import QuasarError
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.rejection import accept
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.stopping import StopChecker

ERROR = "error"


class Request:
    """Prompt, emitted ids and everything that decides the next one.

    context: prompt and emitted ids; the drafter reads this very list.
    sequence: the engine's handle while the request is active, else None.
    num_cached: ids of the context whose rows are in the engine's cache.
    error: why the request failed, or None.
    """

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        max_seq_len: int,
    ):
        self.id = request_id
        self.prompt = prompt
        self.context = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.context)
        self.sampler = Sampler(params)
        self.stop = StopChecker(params, eos_token_ids, room=max_seq_len - self.num_prompt_tokens)
        self.metrics = SpeculationMetrics()
        self.sequence: int | None = None
        self.num_cached = 0
        self.error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Emitted ids so far."""
        return self.context[self.num_prompt_tokens :]

    @property
    def finish_reason(self) -> str | None:
        return ERROR if self.error else self.stop.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.error or self.stop.stop_reason

    def reaches_end(self, chunk: Sequence[int]) -> bool:
        """Whether the cache will hold the whole context once `chunk` has entered it."""
        return self.num_cached + len(chunk) == len(self.context)

    def accept(self, logits: np.ndarray, draft: Draft) -> Acceptance:
        """Acceptance of a draft, from its rows of logits; a first row that is no distribution ends this request alone."""
        try:
            return accept(logits, draft, self.sampler, len(self.context), self.stop.finishes)
        except QuasarError as error:
            self.error = str(error)
            return Acceptance((), 0)

    def commit(self, acceptance: Acceptance) -> list[int]:
        """Appends what was emitted, up to the id that finishes the request; returns what was appended."""
        before = len(self.context)
        for token in acceptance.emitted:
            self.context.append(token)
            if self.stop.emit(token):
                break
        self.num_cached = before + acceptance.num_accepted_tokens
        return self.context[before:]
