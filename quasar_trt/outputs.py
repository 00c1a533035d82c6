"""What a caller gets back (names are vLLM's)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from quasar_trt.logprobs import Logprob
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.service_metrics import ServiceMetrics


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    index: which of the prompt's completions.
    token_ids: emitted ids, with the one that ended the completion.
    finish_reason: "stop", "length", "abort", "timeout", or "error" when the engine gave a row that is not a distribution or
        the parameters left no token; that ends this completion only.
    stop_reason: for "stop" the text or id that ended it (None for the model's first end-of-sequence id), for "error" the
        message.
    logprobs: per emitted id {token: Logprob}, the id itself first; None unless asked for.
    decode: gives the text.
    origins: per emitted id where it came from, as `Request.origins`.
    text_offsets: per emitted id where its text begins in the completion's, in characters; empty unless the text was decoded as
        the tokens came.
    text: decoded when it is first read; empty when the runner has no tokenizer.
    """

    index: int
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None
    decode: Callable[[], str] = field(repr=False, compare=False)
    origins: list[str] = field(default_factory=list, compare=False)
    text_offsets: list[int] = field(default_factory=list, compare=False)

    @cached_property
    def text(self) -> str:
        return self.decode()

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all emitted ids; None unless logprobs were asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt; `prompt` is None when token ids were given.

    prompt_logprobs: per id of the prompt {token: Logprob}, None for the first id, which nothing predicts; None unless asked
        for, or when the prompt could not be read to its end.
    outputs: one completion for each of `n`.
    metrics, service: over all of them.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    metrics: SpeculationMetrics
    service: ServiceMetrics


@dataclass(frozen=True)
class StreamOutput:
    """What one step of a stream added to one completion.

    text: what the emitted ids add to the text; a character whose bytes are not complete, and what may be the beginning of
        a stop text, come with a later piece. Empty when the runner has no tokenizer and when the caller wants ids only.
    token_ids: the emitted ids; none in the last piece of a completion that was ended by a timeout.
    finish_reason, stop_reason: None until the last piece.
    logprobs, origins, text_offsets: as in CompletionOutput, of the emitted ids.
    index: which of the prompt's completions.
    metrics: over the completion; None until its last piece.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    index: int = 0
    origins: list[str] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    metrics: SpeculationMetrics | None = None
