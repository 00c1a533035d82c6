"""From one row of logits to the target distribution p and a token.

The request's logits processors, temperature, min-p, top-k, top-p, then one keyed uniform through the inverse CDF.

All randomness is a pure function of (seed, sample index, position, stream), so a token depends on nothing but its own
request: not on the drafter, the draft length, the neighbours or what was sampled before. The inverse CDF runs in the order
of token ids.

Everything over the whole vocabulary is float32 and vectorised: a verify pass takes a few milliseconds, and sampling its
rows must not show.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Sequence

import numpy as np

from quasar_trt.errors import QuasarError
from quasar_trt.logits_processors import LogitsProcessors
from quasar_trt.sampling_params import SamplingParams

# Streams of noise at one position, number 0 of each kind: they are independent of each other.
SAMPLE = 0  # the uniform that picks a token (of p, or of the residual after a rejection)
ACCEPT = 1  # the uniform of the ratio test
DRAFT = 2  # the uniform by which a drafter with probabilities draws its token from q
SEED = 3  # the seed of an engine that samples by itself

_NUM_STREAMS = 4

_KEY = struct.Struct("<qqqq")
_BLOCK = 256  # weights per partial sum of the inverse CDF
# 1 / temperature is kept within these: above, p is one-hot anyway; below, it is uniform anyway. In float32 neither end
# becomes infinite or 0, which would turn the 0 of the maximum or the -inf of a masked id into NaN.
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-30, 1e30


def noise(seed: int, sample: int, position: int, stream: int) -> int:
    """64 random bits, keyed by four 64-bit integers."""
    digest = hashlib.blake2b(_KEY.pack(seed, sample, position, stream), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(seed: int, sample: int, position: int, stream: int) -> float:
    """A number in [0, 1) with 53 random bits of `noise`."""
    return (noise(seed, sample, position, stream) >> 11) * 2.0**-53


def numbered(stream: int, number: int) -> int:
    """One of several streams of a kind at one position: of siblings in a tree, or of drafts that begin at different positions.
    The first is number 0."""
    return stream + _NUM_STREAMS * number


class Target:
    """The target distribution p of one row.

    weights: [n] float32, proportional to p. Valid until the next call of its sampler, which owns the memory.
    ids: [n] ascending token ids that the weights belong to, or None for the whole vocabulary.
    """

    def __init__(self, weights: np.ndarray, ids: np.ndarray | None = None):
        self.weights = weights
        self.ids = ids
        sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK))
        self._cumulative = np.cumsum(sums, dtype=np.float64)

    @property
    def total(self) -> float:
        return float(self._cumulative[-1])

    def probability(self, token: int) -> float:
        """p(token), rounded as in `dense`."""
        index = token if self.ids is None else int(np.searchsorted(self.ids, token))
        if self.ids is not None and (index == len(self.ids) or self.ids[index] != token):
            return 0.0
        return float(self.weights[index] / np.float32(self.total))

    def dense(self, vocab: int) -> np.ndarray:
        """p as [vocab] float32, each entry rounded once; a fresh array."""
        p = np.zeros(vocab, np.float32)
        p[slice(None) if self.ids is None else self.ids] = self.weights
        p /= np.float32(self.total)
        return p

    def pick(self, u: float) -> int:
        """The first token, in order of ids, whose cumulative probability exceeds u; never one with probability 0."""
        block, rest = _first_above(self._cumulative, u * self.total)
        within = np.cumsum(self.weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
        index = block * _BLOCK + _first_above(within, rest)[0]
        return index if self.ids is None else int(self.ids[index])


def _first_above(cumulative: np.ndarray, goal: float) -> tuple[int, float]:
    """Index of the first entry above `goal`, and how far `goal` lies above the entry before it.

    When rounding leaves no entry above it, the first that reaches the total: entries after that add nothing.
    """
    index = int(cumulative.searchsorted(goal, side="right"))
    if index == len(cumulative):
        index = int(cumulative.searchsorted(cumulative[-1], side="left"))
    return index, goal - float(cumulative[index - 1]) if index else goal


def most_probable(logits: np.ndarray, count: int) -> np.ndarray:
    """Ascending ids of the `count` largest logits; equal ones at the border go to the lower ids."""
    if count >= len(logits):
        return np.arange(len(logits))
    if count == 0:
        return np.arange(0)
    return _at_least(logits, np.partition(logits, -count)[-count], count)


def _at_least(values: np.ndarray, border: np.float32, count: int) -> np.ndarray:
    """Ascending indices of the `count` largest of `values`, the smallest of which equals `border`.

    Values equal to the border go to the lower indices.
    """
    indices = np.flatnonzero(values >= border)
    surplus = len(indices) - count
    if surplus:
        ties = np.flatnonzero(values[indices] == border)
        indices = np.delete(indices, ties[-surplus:])
    return indices


class Sampler:
    """Turns rows of logits into tokens for one sample of one request.

    sample_index: tells apart the completions of one prompt and seed.
    processors: what the request's parameters do to a row before temperature; None for nothing.
    """

    def __init__(self, params: SamplingParams, sample_index: int = 0, processors: LogitsProcessors | None = None):
        self.params = params
        self._processors = processors
        self.greedy = params.greedy
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._sample_index = sample_index
        scale = 1.0 if self.greedy else 1.0 / params.temperature
        self._scale = min(max(scale, _SMALLEST_SCALE), _LARGEST_SCALE)
        self._scratch = np.empty(0, np.float32)

    def uniform(self, position: int, stream: int) -> float:
        return uniform(self._seed, self._sample_index, position, stream)

    def seed(self, position: int) -> int:
        """64 bits for the generator of an engine that samples by itself, from `position` on."""
        return noise(self._seed, self._sample_index, position, SEED)

    def sample(self, logits: np.ndarray, position: int, drafted: Sequence[int] = ()) -> int:
        """The token at `position` of the sequence, given its row of logits [vocab] float32.

        drafted: the ids between the committed ones and the row, counted as emitted.

        Raises QuasarError for a row without a finite maximum (NaN, infinite, or everything masked).
        """
        if self.greedy:
            if self._processors:
                logits = self._processors(logits, drafted)
            token = int(logits.argmax())  # the first of equal maxima, and NaN before any number
            check_maximum(float(logits[token]))
            return token
        return self.target(logits, drafted).pick(self.uniform(position, SAMPLE))

    def target(self, logits: np.ndarray, drafted: Sequence[int] = ()) -> Target:
        """p of one row [vocab] float32 at a temperature above 0; `drafted` and QuasarError as in `sample`.

        p = softmax(processed logits / temperature), restricted to tokens at least min_p times as probable as the most
        probable one and to the top_k most probable, then to the smallest set of these that reaches top_p of what is left,
        then renormalised.
        """
        if self._processors:
            logits = self._processors(logits, drafted)
        maximum = float(logits.max())
        check_maximum(maximum)
        ids = None
        top_k = self.params.top_k
        if 0 < top_k < len(logits):
            ids = most_probable(logits, top_k)
            logits = logits[ids]
        if len(self._scratch) < len(logits):
            self._scratch = np.empty(len(logits), np.float32)
        weights = self._scratch[: len(logits)]
        with np.errstate(over="ignore", under="ignore"):  # far below the maximum, a weight is 0
            np.subtract(logits, np.float32(maximum), out=weights)
            weights *= np.float32(self._scale)
            np.exp(weights, out=weights)
        if self.params.min_p:  # the largest weight is 1
            weights[weights < np.float32(self.params.min_p)] = 0.0
        target = Target(weights, ids)
        return target if self.params.top_p == 1.0 else self._nucleus(target)

    def _nucleus(self, target: Target) -> Target:
        top_p, weights = self.params.top_p, target.weights
        # A token of the nucleus leaves more than 1 - top_p to itself and the at most n tokens no more probable than it,
        # so its own share is above (1 - top_p) / n: only these need sorting. The factor makes room for rounding.
        floor = 0.999 * (1.0 - top_p) * target.total / len(weights)
        candidates = np.flatnonzero(weights >= np.float32(floor))
        values = weights[candidates]
        descending = np.sort(values)[::-1]
        cumulative = np.cumsum(descending, dtype=np.float64)
        count = min(int(cumulative.searchsorted(top_p * target.total)) + 1, len(values))
        kept = candidates[_at_least(values, descending[count - 1], count)]
        return Target(weights[kept], kept if target.ids is None else target.ids[kept])


def check_maximum(maximum: float) -> None:
    """Raises QuasarError unless a row of logits with this maximum is a distribution."""
    if not math.isfinite(maximum):
        raise QuasarError(
            f"the engine gave a row of logits whose maximum is {maximum}, not a finite number; "
            "its weights may be damaged: check them with quasar-trt info --verify, or build the engine again"
        )
