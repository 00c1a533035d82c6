"""What a caller gets back (names are vLLM's)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from quasar_trt.metrics import SpeculationMetrics


@dataclass(frozen=True)
class CompletionOutput:
    """One completion.

    token_ids: emitted ids, the end-of-sequence id included.
    finish_reason: "stop", "length", or "error" when the engine gave a row that is not a distribution; that ends this
        request only.
    stop_reason: for "stop" the id that ended it (None for the model's first end-of-sequence id), for "error" the message.
    text: without special tokens, decoded when it is read; empty when the runner has no tokenizer.
    """

    index: int
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    decode: Callable[[Sequence[int]], str] = field(repr=False, compare=False)

    @cached_property
    def text(self) -> str:
        return self.decode(self.token_ids)


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt; `prompt` is None when token ids were given."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: SpeculationMetrics


@dataclass(frozen=True)
class StreamOutput:
    """What one step of a stream added.

    text: the text of the emitted ids, without special tokens; a character whose bytes are not complete comes with a later
        piece. Empty when the runner has no tokenizer and when the caller wants ids only.
    token_ids: the emitted ids.
    finish_reason: None until the last piece.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
