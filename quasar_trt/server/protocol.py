"""What clients may send: OpenAI's parameters, and those that vLLM adds. Whatever is not here is refused by name.

Ranges are not repeated here: `SamplingParams` checks them. The limits that are here bound the work that one request can make.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quasar_trt.errors import unknown
from quasar_trt.sampling_params import SamplingParams

MAX_LOGPROBS = 20  # as OpenAI and vLLM
MAX_COMPLETIONS = 128  # of one prompt, as OpenAI
MAX_TEXTS = 64  # in `stop` and `bad_words`
MAX_TEXT_LENGTH = 256  # characters of each

# OpenAI's and vLLM's, which this server has not; null, their default, asks for nothing.
_UNSUPPORTED = {
    "audio", "best_of", "function_call", "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "length_penalty", "metadata", "modalities", "parallel_tool_calls", "prediction", "priority", "reasoning_effort",
    "response_format", "service_tier", "store", "structured_outputs", "suffix", "tool_choice", "tools", "use_beam_search",
    "verbosity", "web_search_options",
}  # fmt: skip

Several = Annotated[list[str], Field(fail_fast=True, max_length=MAX_TEXTS)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(BaseModel):
    """Values have the type that is asked for; a name that is not a field is refused with the nearest one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values):
        if not isinstance(values, dict):
            return values
        for name in values:
            if name in cls.model_fields:
                continue
            if name not in _UNSUPPORTED:
                raise wrong(name, str(unknown("parameter", name, cls.model_fields)))
            if values[name] is not None:
                raise wrong(name, f"{name} is not supported by this server; leave it out")
        return {name: value for name, value in values.items() if name in cls.model_fields}


def wrong(name: str, message: str) -> PydanticCustomError:
    """The error for one parameter."""
    return PydanticCustomError("parameter", "{message}", {"name": utf8(name), "message": utf8(message)})


def utf8(text: str) -> str:
    """With halves of surrogate pairs, which JSON may hold and UTF-8 may not, in digits."""
    return text.encode(errors="backslashreplace").decode()


class StreamOptions(Body):
    include_usage: bool | None = None


class Sampling(Body):
    """What both kinds of completion share. None means not given: the model's own value counts, or else OpenAI's default."""

    model: str | None = None
    n: Annotated[int, Field(le=MAX_COMPLETIONS)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Several | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Several | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256, description="Shown in the server's log.")
    return_token_ids: bool | None = Field(None, description="Add ids, origins and text offsets of the tokens.")
    drafter: str | None = Field(None, description="'none' decodes plainly; otherwise the server's own drafter.")

    @model_validator(mode="after")
    def _consistent(self):
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream_options is given without stream; set stream or leave it out")
        if self.stream and self.prompt_logprobs is not None:
            raise wrong("prompt_logprobs", "prompt_logprobs cannot be streamed; leave out stream or prompt_logprobs")
        for name in ("stop", "bad_words"):
            texts = getattr(self, name) or ()
            if any(len(text) > MAX_TEXT_LENGTH for text in ([texts] if isinstance(texts, str) else texts)):
                raise wrong(name, f"{name} has a text of more than {MAX_TEXT_LENGTH} characters; give shorter ones")
        return self

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Most probable tokens that are asked for at each position."""

    def sampling_params(self, **defaults: object) -> SamplingParams:
        """What is given, over `defaults`. Raises QuasarError for a value that is not allowed."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name, None) is not None}
        given.pop("logprobs", None)
        return SamplingParams(**defaults | given, logprobs=self.num_logprobs)


_SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    )
    echo: bool | None = None
    logprobs: Count | None = None

    @model_validator(mode="after")
    def _scored(self):
        if self.echo and self.stream and self.logprobs is not None:
            raise wrong("echo", "echo with logprobs cannot be streamed; leave out one of echo, logprobs and stream")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        return self.prompt if isinstance(self.prompt, list) and not _is_ids(self.prompt) else [self.prompt]


def _is_ids(values: list) -> bool:
    return not values or isinstance(values[0], int)


class TextPart(Body):
    type: str
    text: str

    @model_validator(mode="after")
    def _is_text(self):
        if self.type != "text":
            raise wrong("messages", f"messages has a part of type {self.type!r}; allowed: 'text'")
        return self


class Message(Body):
    """Fields that are None alone are those of an answer that a client sends back."""

    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def as_dict(self) -> dict[str, str]:
        """As the chat template reads it; parts are joined by line feeds."""
        parts = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": parts}


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None

    @model_validator(mode="after")
    def _agreeing(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs is given without logprobs; set logprobs or leave it out")
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise wrong("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
            self.max_tokens = self.max_completion_tokens
        if self.add_generation_prompt and self.continue_final_message:
            raise wrong(
                "continue_final_message", "continue_final_message excludes add_generation_prompt; give one of them"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_options(self) -> dict[str, object]:
        """As `quasar_trt.tokenizer.chat_text` takes them."""
        continues = bool(self.continue_final_message)
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "add_generation_prompt": begins,
            "continue_final_message": continues,
            "template_values": self.chat_template_kwargs,
        }


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self):
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer whose status is 400 or more."""

    error: ErrorDetail
