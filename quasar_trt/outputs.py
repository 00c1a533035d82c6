"""What a caller gets back (names are vLLM's). Text is decoded when it is read, so that callers who want ids pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.metrics import SpeculationMetrics


@dataclass(frozen=True)
class CompletionOutput:
    """One completion.

    token_ids: emitted ids, the end-of-sequence id included.
    finish_reason: "stop", "length", or "error" when the engine gave a row that is not a distribution; that ends this
        request only.
    stop_reason: for "stop" the id that ended it (None for the model's first end-of-sequence id), for "error" the message.
    text: without special tokens; empty when the runner has no tokenizer.
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


class StreamText:
    """The text of a stream's pieces, decoded up to a piece when that piece's text is read."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._detokenizer = Detokenizer(decode)
        self._pieces: list[tuple[list[int], bool]] = []
        self._texts: list[str] = []

    def append(self, token_ids: list[int], final: bool) -> int:
        """Adds a piece; returns its index."""
        self._pieces.append((token_ids, final))
        return len(self._pieces) - 1

    def __getitem__(self, index: int) -> str:
        while len(self._texts) <= index:
            self._texts.append(self._detokenizer.push(*self._pieces[len(self._texts)]))
        return self._texts[index]


@dataclass(frozen=True)
class StreamOutput:
    """What one step of a stream added.

    token_ids: the emitted ids. finish_reason: None until the last piece.
    text: their text; a character whose bytes are not complete comes with a later piece.
    """

    token_ids: list[int]
    finish_reason: str | None
    index: int = field(repr=False, compare=False)
    texts: StreamText = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        return self.texts[self.index]
