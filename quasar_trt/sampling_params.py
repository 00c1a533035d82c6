"""What a caller may ask of one request (names, defaults and meanings are vLLM's; docs/sampling.md)."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, TypeAlias

from quasar_trt.errors import QuasarError, named_options

if TYPE_CHECKING:
    import numpy as np

# (ids emitted so far, the draft tokens before the row included; the row [vocab] float32, to keep or change) -> the row
LogitsProcessor: TypeAlias = "Callable[[list[int], np.ndarray], np.ndarray]"


class _Refused(Exception):
    """A value is none of those allowed."""


def _number(kind: type, convert: type, allows: Callable[[object], bool]):
    """Reads one number; a bool is none, and numbers of other libraries become Python's."""

    def read(value):
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _Refused
        try:
            number = convert(value)
        except OverflowError:  # an integer of more than 308 digits
            raise _Refused from None
        if not allows(number):
            raise _Refused
        return number

    return read


def _real(allows):
    return _number(Real, float, allows)


def _integer(allows):
    return _number(Integral, int, allows)


def _several(read_item):
    """Reads a list, without what it repeats, as a tuple."""

    def read(values):
        values = values.tolist() if hasattr(values, "tolist") else values  # arrays
        if isinstance(values, str | bytes) or not isinstance(values, Sequence | set | frozenset):
            raise _Refused
        return tuple(dict.fromkeys(read_item(value) for value in values))

    return read


def _text(value):
    if not isinstance(value, str) or not value:
        raise _Refused
    return value


def _text_or_several(value):
    return _several(_text)([value] if isinstance(value, str) else value)


def _callable(value):
    if not callable(value):
        raise _Refused
    return value


def _some(read):
    """Reads a list that is not empty."""

    def read_some(values):
        items = read(values)
        if not items:
            raise _Refused
        return items

    return read_some


def _biases(value):
    if not isinstance(value, Mapping):
        raise _Refused
    biases = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key  # in JSON every key is text
        biases[_TOKEN(token)] = _real(math.isfinite)(bias)
    return biases


_TOKEN = _integer(lambda x: x >= 0)
_FLAG = _number(bool, bool, lambda x: True)
_NUM_LOGPROBS = _integer(lambda x: x >= -1)
_LOGPROBS_ALLOWED = "0 or more, -1 for the whole vocabulary, or None"

# field -> how its value is read, what is allowed
_RULES = {
    "n": (_integer(lambda x: x >= 1), "an integer of at least 1"),
    "presence_penalty": (_real(lambda x: -2 <= x <= 2), "-2 to 2"),
    "frequency_penalty": (_real(lambda x: -2 <= x <= 2), "-2 to 2"),
    "repetition_penalty": (_real(lambda x: 0 < x < math.inf), "a finite number above 0"),
    "temperature": (_real(lambda x: 0 <= x < math.inf), "0 (greedy) or more, finite"),
    "top_p": (_real(lambda x: 0 < x <= 1), "a number above 0, at most 1"),
    "top_k": (_integer(lambda x: x >= -1), "a positive integer, or 0 or -1 for all tokens"),
    "min_p": (_real(lambda x: 0 <= x <= 1), "0 to 1"),
    "seed": (_integer(lambda x: -(2**63) <= x < 2**63), "a 64-bit integer, or None for a fresh one"),
    "stop": (_text_or_several, "a text that is not empty, or a list of such texts"),
    "stop_token_ids": (_several(_TOKEN), "a list of token ids"),
    "bad_words": (_several(_text), "a list of texts that are not empty"),
    "ignore_eos": (_FLAG, "True or False"),
    "max_tokens": (_integer(lambda x: x >= 1), "an integer of at least 1, or None for as many as fit"),
    "min_tokens": (_integer(lambda x: x >= 0), "an integer of at least 0"),
    "logprobs": (_NUM_LOGPROBS, _LOGPROBS_ALLOWED),
    "prompt_logprobs": (_NUM_LOGPROBS, _LOGPROBS_ALLOWED),
    "logit_bias": (_biases, "a mapping of token ids to finite numbers"),
    "allowed_token_ids": (_some(_several(_TOKEN)), "a list of at least one token id, or None for all"),
    "skip_special_tokens": (_FLAG, "True or False"),
    "include_stop_str_in_output": (_FLAG, "True or False"),
    "logits_processors": (_several(_callable), "a list of callables (token ids, row of logits) -> row of logits"),
}


@named_options("sampling parameter")
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; every one acts on every verified row.

    n: completions of the prompt. They share its pass, and the noise of each is its own.
    presence_penalty, frequency_penalty: subtracted from the logit of every emitted token, once and once per occurrence.
    repetition_penalty: divides a positive logit, multiplies a negative one, of every token of the prompt or emitted.
    temperature: 0 is greedy (ties go to the lowest id).
    top_p: keep the smallest set of most probable tokens whose probability reaches top_p, after min_p and top_k.
    top_k: keep the k most probable tokens (ties at the border go to the lower ids); 0 or -1 keeps all.
    min_p: keep tokens at least min_p times as probable as the most probable one.
    seed: any 64-bit integer; None draws one from the system, so unseeded requests differ.
    stop: texts that end the request where they appear; the text ends before them.
    stop_token_ids: ids that end the request, besides the model's own.
    bad_words: texts whose last token is never emitted after the others of the same text.
    ignore_eos: go on past the model's end-of-sequence ids.
    max_tokens: the most ids to emit, at least 1; None for as many as the context holds.
    min_tokens: ids to emit before anything but max_tokens may end the request.
    logprobs, prompt_logprobs: log probabilities of this many most probable tokens, and of the token itself, for each
        emitted token and each token of the prompt; -1 for the whole vocabulary. They are the model's own: of its logits
        before any parameter.
    logit_bias: {token id: what is added to its logit}.
    allowed_token_ids: no other id is emitted.
    skip_special_tokens: leave special tokens out of the text.
    include_stop_str_in_output: keep the text of what ended the request, a stop text or a stop id.
    logits_processors: callables (ids emitted so far, row of logits [vocab] float32) -> row of logits.

    Lists are stored as tuples without what they repeat. Raises QuasarError for a value that is not allowed, an unknown name
    and parameters that contradict each other.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logits_processors: Sequence[LogitsProcessor] | None = None

    def __post_init__(self):
        for name, (read, allowed) in _RULES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                value = _OPTIONAL[name]
            else:
                try:
                    value = read(value)
                except _Refused:
                    raise QuasarError(f"{name} is {reprlib.repr(value)}; allowed: {allowed}") from None
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise QuasarError(
                f"min_tokens is {self.min_tokens}; allowed: at most max_tokens, which is {self.max_tokens}"
            )
        if self.greedy and self.n > 1:
            raise QuasarError(
                f"n is {self.n}; allowed: 1 at temperature 0, where all completions are the same; set a temperature"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


# field -> what None stands for, as it is stored
_OPTIONAL = {
    "seed": None,
    "max_tokens": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "allowed_token_ids": None,
    "stop": (),
    "stop_token_ids": (),
    "bad_words": (),
    "logits_processors": (),
    "logit_bias": {},
}
