"""What a caller may ask of one request (names and defaults are vLLM's)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from quasar_trt.errors import QuasarError, named_options


def _float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


# field -> what it is stored as, the type taken (a bool is no number), whether a value is allowed, the same in words
_RULES = {
    "temperature": (_float, Real, lambda x: 0 <= x < math.inf, "0 (greedy) or more, finite"),
    "top_k": (int, Integral, lambda x: x >= -1, "a positive integer, or 0 or -1 for all tokens"),
    "top_p": (_float, Real, lambda x: 0 < x <= 1, "a number above 0, at most 1"),
    "seed": (int, Integral, lambda x: -(2**63) <= x < 2**63, "a 64-bit integer, or None for a fresh one"),
    "max_tokens": (int, Integral, lambda x: x >= 1, "an integer of at least 1"),
    "ignore_eos": (bool, bool, lambda x: True, "True or False"),
}


@named_options("sampling parameter")
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; every one acts on every verified row.

    temperature: 0 is greedy (ties go to the lowest id).
    top_k: keep the k most probable tokens (ties at the border go to the lower ids); 0 or -1 keeps all.
    top_p: keep the smallest set of most probable tokens whose probability reaches top_p, after top_k.
    seed: any 64-bit integer; None draws one from the system, so unseeded requests differ.
    max_tokens: the most ids to emit, at least 1.
    ignore_eos: go on past the model's end-of-sequence ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    ignore_eos: bool = False

    def __post_init__(self):
        for name, (convert, kind, allows, allowed) in _RULES.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            right_type = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if not right_type or not allows(convert(value)):
                raise QuasarError(f"{name} is {value!r}; allowed: {allowed}")
            object.__setattr__(self, name, convert(value))  # numbers of other libraries become Python's

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
