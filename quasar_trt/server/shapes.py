"""What a completion looks like in either of OpenAI's APIs: whole, or piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from quasar_trt.outputs import CompletionOutput, RequestOutput, StreamOutput
from quasar_trt.server.logprobs import chat_logprobs, completion_logprobs, echoed_logprobs, prompt_logprobs
from quasar_trt.server.protocol import ChatRequest, CompletionRequest

Choice = dict[str, object]


class Shape(ABC):
    """Makes choices of outputs.

    prompts: the ids of each; request: what was asked.
    """

    prefix: str  # of the answer's id
    whole: str  # kind of an answer that comes at once
    piece: str  # kind of one that streams

    def __init__(self, request: CompletionRequest | ChatRequest, prompts: Sequence[list[int]]):
        self.prompts = prompts
        self._request = request
        self._begun: set[int] = set()  # choices of which a piece was made

    def choice(self, prompt: int, answer: RequestOutput, output: CompletionOutput) -> Choice:
        """A whole completion of the prompt with this index."""
        choice = self._choice(prompt, output)
        if self._request.prompt_logprobs is not None and answer.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = self.prompts[prompt]
        return choice

    def delta(self, prompt: int, output: StreamOutput) -> Choice | None:
        """A piece of a completion; None where there is nothing to tell."""
        choice = self._choice(prompt, output, streams=True)
        begins = choice["index"] not in self._begun
        self._begun.add(choice["index"])
        if begins and self._request.return_token_ids:
            choice["prompt_token_ids"] = self.prompts[prompt]
        tells = begins or output.finish_reason or output.text or self._request.return_token_ids
        return choice if tells or output.logprobs else None

    def _choice(self, prompt: int, output: CompletionOutput | StreamOutput, streams: bool = False) -> Choice:
        index = prompt * self._num_each + output.index
        choice: Choice = {
            "index": index,
            **self._content(prompt, output, streams, begins=streams and index not in self._begun),
            "logprobs": None if output.logprobs is None else self._logprobs(prompt, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._request.return_token_ids:
            choice |= {
                "token_ids": output.token_ids,
                "token_origins": output.origins,
                "text_offsets": output.text_offsets,
            }
        return choice

    @property
    def _num_each(self) -> int:
        return self._request.n or 1

    @abstractmethod
    def _content(self, prompt: int, output, streams: bool, begins: bool) -> Choice:
        """What of a choice is text."""

    @abstractmethod
    def _logprobs(self, prompt: int, output) -> dict[str, object]:
        """Those of an output that has them."""


@dataclass(frozen=True)
class Echo:
    """A prompt's text, and the texts of its tokens where they are needed."""

    text: str
    tokens: list[str]


class CompletionShape(Shape):
    """Of /v1/completions.

    echoes: of each prompt, to be repeated before its completions; None for no repetition.
    """

    prefix, whole, piece = "cmpl-", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, prompts: Sequence[list[int]], echoes: Sequence[Echo] | None):
        super().__init__(request, prompts)
        self._echoes = echoes

    def choice(self, prompt: int, answer: RequestOutput, output: CompletionOutput) -> Choice:
        choice = super().choice(prompt, answer, output)
        if self._echoes and output.logprobs is not None and answer.prompt_logprobs is not None:
            tokens = self._echoes[prompt].tokens
            before = echoed_logprobs(tokens, self.prompts[prompt], answer.prompt_logprobs)
            choice["logprobs"] = {name: before[name] + own for name, own in choice["logprobs"].items()}
        return choice

    def _content(self, prompt: int, output, streams: bool, begins: bool) -> Choice:
        repeats = self._echoes and (begins or not streams)
        return {"text": self._echoes[prompt].text + output.text if repeats else output.text}

    def _logprobs(self, prompt: int, output) -> dict[str, object]:
        before = len(self._echoes[prompt].text) if self._echoes else 0
        offsets = [before + offset for offset in output.text_offsets]
        return completion_logprobs(output.token_ids, output.logprobs, offsets)


class ChatShape(Shape):
    """Of /v1/chat/completions."""

    prefix, whole, piece = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _content(self, prompt: int, output, streams: bool, begins: bool) -> Choice:
        if not streams:
            return {"message": {"role": "assistant", "content": output.text}}
        delta = {"role": "assistant", "content": output.text} if begins else {"content": output.text}
        return {"delta": delta}

    def _logprobs(self, prompt: int, output) -> dict[str, object]:
        return chat_logprobs(output.token_ids, output.logprobs, self._request.top_logprobs or 0)
