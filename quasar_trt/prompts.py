"""Prompts as callers give them: one or several, text or token ids, lists or arrays."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from numbers import Integral

from quasar_trt.errors import QuasarError

Prompt = str | Sequence[int]


def as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts one by one; what is neither a prompt nor a sequence of prompts comes as one, to be refused."""
    prompts = _plain(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        return [prompts]
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def token_ids(prompt: Sequence[int]) -> list[int]:
    """Raises QuasarError for anything but a sequence of integers."""
    ids = _plain(prompt)
    if isinstance(ids, Sequence) and not isinstance(ids, bytes) and all(isinstance(token, Integral) for token in ids):
        return [int(token) for token in ids]
    raise QuasarError(f"a prompt is {reprlib.repr(prompt)}; allowed: text, or a list of integer token ids")


def _plain(values):
    """Arrays as lists, everything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values
