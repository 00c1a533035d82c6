"""Log probabilities of the model's own distribution: of its logits before any sampling parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quasar_trt.sampling import check_maximum, most_probable


@dataclass(frozen=True)
class Logprob:
    """One token at one position.

    rank: 1 for the most probable token; equal ones go by their ids.
    decoded_token: its text alone; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class TokenLogprobs:
    """The token of one position, then the most probable ones in order; compact until someone reads them.

    ids: [1 + k] int64; values: [1 + k] float32, log probabilities; rank: of the token.
    """

    ids: np.ndarray
    values: np.ndarray
    rank: int


def token_logprobs(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """Of `token` and the `count` most probable ones (-1: all), from a row of logits [vocab] float32.

    log p(x) = logit(x) - maximum - log(sum over y of exp(logit(y) - maximum))

    Raises QuasarError for a row without a finite maximum.
    """
    count = len(logits) if count < 0 else count
    maximum = logits.max()
    check_maximum(float(maximum))
    total = float(np.exp(logits - maximum).sum(dtype=np.float64))
    top = most_probable(logits, count)
    top = top[np.argsort(-logits[top], kind="stable")]
    ids = np.concatenate(([token], top))
    values = (logits[ids].astype(np.float64) - float(maximum) - math.log(total)).astype(np.float32)
    own = logits[token]
    rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token] == own))
    return TokenLogprobs(ids, values, rank)


def by_token(entry: TokenLogprobs, decode: Callable[[int], str] | None) -> dict[int, Logprob]:
    """{token: Logprob}, the position's own token first, then the most probable ones in order."""
    ranks = (entry.rank, *range(1, len(entry.ids)))
    found: dict[int, Logprob] = {}
    for token, value, rank in zip(entry.ids.tolist(), entry.values.tolist(), ranks, strict=True):
        if token not in found:
            found[token] = Logprob(value, rank, decode(token) if decode else None)
    return found
