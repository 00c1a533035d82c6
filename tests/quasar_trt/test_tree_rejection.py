"""Acceptance of trees: a path of sampled tokens, or the target's distribution after tests of siblings in turn."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import numpy as np
import pytest
from stubs import one_hot_logits, paths, random_logits

from quasar_trt.drafters.base import NO_DRAFT, Draft
from quasar_trt.errors import QuasarError
from quasar_trt.logits_processors import LogitsProcessors
from quasar_trt.rejection import accept
from quasar_trt.sampling import ACCEPT, DRAFT, SAMPLE, Sampler, numbered
from quasar_trt.sampling_params import SamplingParams

LARGEST = 1.0 - 2.0**-53  # uniform
VOCAB = 4


def never(_token: int) -> bool:
    return False


def normal(*seeds: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seeds).normal(0, 1, vocab).astype(np.float32)


class FixedSampler(Sampler):
    """A sampler whose uniforms are given by stream; they may not be asked for at two positions."""

    def __init__(self, params: SamplingParams, uniforms: dict[int, float]):
        super().__init__(params)
        self.uniforms = uniforms

    def uniform(self, position: int, stream: int) -> float:
        assert position == 5
        return self.uniforms[stream]


def distribution(outcome, streams: list[int], fixed: dict[int, float]) -> Counter:
    """The distribution of `outcome(uniforms by stream)` over uniforms of the streams, as exact as 1e-4 per step of it.

    Along each uniform an outcome does not come back, so what is the same at both ends is the same between them.
    """
    if not streams:
        return Counter({outcome(fixed): 1.0})
    stream, *rest = streams

    def between(low: float, high: float, at_low: Counter, at_high: Counter) -> Counter:
        if at_low == at_high or high - low < 1e-4:
            return Counter({key: (high - low) * (at_low[key] + at_high[key]) / 2 for key in at_low | at_high})
        middle = (low + high) / 2
        at_middle = distribution(outcome, rest, fixed | {stream: middle})
        found = between(low, middle, at_low, at_middle)
        found.update(between(middle, high, at_middle, at_high))
        return found

    ends = [distribution(outcome, rest, fixed | {stream: u}) for u in (0.0, LARGEST)]
    return between(0.0, 1.0, *ends)


def draws(q: np.ndarray, count: int, replace: bool):
    """Every tuple of `count` siblings: (probability, tokens, the distribution that each was drawn from)."""
    if count == 0:
        yield 1.0, (), ()
        return
    for share, tokens, rows in draws(q, count - 1, replace):
        row = q.copy()
        if not replace:
            row[list(tokens)] = 0.0
        if row.sum() == 0.0:
            yield share, tokens, rows
            continue
        row /= row.sum()
        for token in np.flatnonzero(row):
            yield share * float(row[token]), (*tokens, int(token)), (*rows, row)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6, "top_k": 3}])
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_siblings_tested_in_turn_keep_the_target(count, replace, params):
    """All draws of one, two or three siblings and all noise: the first emitted token within 3e-4 of p."""
    params = SamplingParams(**params)
    logits = normal(1)
    q = Sampler(params).target(1.5 * normal(2)).dense(VOCAB)
    streams = [*[numbered(ACCEPT, number) for number in range(count)], SAMPLE]
    found = Counter()
    for share, tokens, rows in draws(q, count, replace):
        draft = Draft(tokens, parents=(-1,) * len(tokens), probs=np.stack(rows))
        stack = np.stack([logits] * (1 + len(draft)))

        def first(uniforms, draft=draft, stack=stack):
            sampler = FixedSampler(params, uniforms)
            return accept(stack, draft, sampler, 5, lambda token: True).emitted[0]

        for token, measure in distribution(first, streams, {}).items():
            found[token] += share * measure
    expected = Sampler(params).target(logits).dense(VOCAB)
    np.testing.assert_allclose([found[token] for token in range(VOCAB)], expected, atol=3e-4)


def test_testing_every_sibling_against_p_itself_would_be_noticed():
    """The enumeration tells the rule from one that forgets what the siblings before took."""
    logits, q = normal(1), np.float32([0.7, 0.1, 0.1, 0.1])
    p = Sampler(SamplingParams()).target(logits).dense(VOCAB)
    accepted = np.minimum(1, p / q)
    once = q * accepted
    rest = 1 - once.sum()
    residual = np.maximum(0, p - q) / np.maximum(0, p - q).sum()
    forgetful = once + rest * (once + rest * residual)
    assert np.abs(forgetful - p).max() > 0.01


def drawn_tree(logits, sampler: Sampler, context: tuple[int, ...], branching: tuple[int, ...], replace: bool) -> Draft:
    """A tree with so many children of each token at each depth, drawn with the request's own noise."""
    ids, parents, probs = [], [], []
    level = [(-1, ())]
    for count in branching:
        following = []
        for parent, before in level:
            target = sampler.target(logits((*context, *before)), before)
            q = target.dense(VOCAB)
            for number in range(count):
                u = sampler.uniform(len(context) + len(before), numbered(DRAFT, number))
                token = int(np.searchsorted(np.cumsum(q, dtype=np.float64), u * q.sum(dtype=np.float64), side="right"))
                probs.append(q)
                following.append((len(ids), (*before, token)))
                ids.append(token)
                parents.append(parent)
                if not replace:
                    q = q.copy()
                    q[token] = 0.0
                    q /= q.sum()
        level = following
    return Draft(tuple(ids), tuple(parents), np.stack(probs))


@pytest.mark.parametrize("replace", [True, False])
def test_two_tokens_of_a_drawn_tree_follow_the_target(replace):
    """8 000 seeded runs of a tree of 2 x 2: shares of the pairs within 0.015 (3.4 standard deviations of a share of 0.2)."""
    model, drafting = (functools.cache(random_logits(VOCAB, seed=seed, spread=1.5)) for seed in (1, 2))
    pairs, depths, context = Counter(), Counter(), (1,)
    for seed in range(8000):
        sampler = Sampler(SamplingParams(seed=seed))
        draft = drawn_tree(drafting, sampler, context, (2, 2), replace)
        rows = np.stack([model(context), *[model((*context, *path)) for path in paths(draft)]])
        result = accept(rows, draft, sampler, 1, never)
        depths[result.num_accepted_tokens] += 1
        emitted = result.emitted
        if len(emitted) == 1:
            emitted += accept(model((*context, *emitted))[None], NO_DRAFT, sampler, 2, never).emitted
        pairs[emitted[:2]] += 1
    plain = Sampler(SamplingParams())
    first = plain.target(model(context)).dense(VOCAB)
    for x, y in itertools.product(range(VOCAB), repeat=2):
        expected = first[x] * plain.target(model((*context, x))).dense(VOCAB)[y]
        assert pairs[x, y] / 8000 == pytest.approx(expected, abs=0.015)
    assert min(depths[depth] for depth in range(3)) > 200


# --- sample matching

#      0 (4)      1 (5)
#    2 (4) 3 (6)   4 (7)
#           5 (1)
TREE = Draft((4, 5, 4, 6, 7, 1), parents=(-1, -1, 0, 0, 1, 3))


def rows_of(chain: list[int], draft: Draft, wrong: int = 9) -> np.ndarray:
    """Rows whose argmax goes on with `chain` on its path and is `wrong` elsewhere."""
    found = []
    for path in ((), *paths(draft)):
        follows = path == tuple(chain[: len(path)]) and len(path) < len(chain)
        found.append(one_hot_logits(chain[len(path)] if follows else wrong, 10))
    return np.stack(found)


@pytest.mark.parametrize(
    ("chain", "path"),
    [
        ([4, 6, 1, 3], (0, 3, 5)),
        ([4, 6, 2], (0, 3)),
        ([4, 4, 0], (0, 2)),
        ([5, 7, 8], (1, 4)),
        ([5, 4], (1,)),
        ([0], ()),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_probs", [False, True])
def test_accepted_tokens_are_a_path(chain, path, temperature, with_probs):
    probs = np.eye(10, dtype=np.float32)[list(TREE.ids)] if with_probs else None
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0))
    draft = Draft(TREE.ids, TREE.parents, probs)
    result = accept(rows_of(chain, draft), draft, sampler, 3, never)
    assert (result.emitted, result.num_accepted_tokens, result.path) == (tuple(chain), len(path), path)
    assert list(result.rows) == [0, *[index + 1 for index in path]]


def test_ids_of_a_tree_are_those_of_plain_decoding():
    """200 random trees over random rows, sampled: the emitted ids are what decoding without a draft gives."""
    logits = random_logits(VOCAB, seed=5)
    generator = np.random.default_rng(0)
    num_accepted = 0
    for seed in range(200):
        sampler = Sampler(SamplingParams(seed=seed))
        size = int(generator.integers(1, 12))
        draft = Draft(
            tuple(generator.integers(0, VOCAB, size).tolist()),
            tuple(int(generator.integers(-1, index)) for index in range(size)),
        )
        context = (1, 2)
        rows = np.stack([logits(context), *[logits((*context, *path)) for path in paths(draft)]])
        result = accept(rows, draft, sampler, len(context), never)
        plain = list(context)
        for _ in result.emitted:
            plain.append(sampler.sample(logits(tuple(plain)), len(plain)))
        assert result.emitted == tuple(plain[len(context) :])
        assert [draft.ids[index] for index in result.path] == list(result.emitted[: result.num_accepted_tokens])
        num_accepted += result.num_accepted_tokens
    assert num_accepted > 100


def test_a_row_counts_its_own_path_alone_as_emitted():
    """Repeating a token is penalised, and token 5 was drafted on the other branch only."""
    seen = []
    params = SamplingParams(
        temperature=0, presence_penalty=2.0, logits_processors=[lambda ids, row: seen.append(list(ids)) or row]
    )
    sampler = Sampler(params, 0, LogitsProcessors(params, [1], (), ()))
    rows = [rows_of([4, 6, 1, token], TREE) / 100 for token in (5, 6)]  # by 1 more probable than others
    assert accept(rows[0], TREE, sampler, 1, never).emitted == (4, 6, 1, 5)
    assert accept(rows[1], TREE, sampler, 1, never).emitted == (4, 6, 1, 0)
    assert seen == [[], [4], [4, 6], [4, 6, 1]] * 2


def test_nothing_is_emitted_after_a_finishing_token_of_a_path():
    rows = rows_of([4, 6, 1, 3], TREE)
    result = accept(rows, TREE, Sampler(SamplingParams(temperature=0)), 0, lambda token: token == 6)
    assert (result.emitted, result.path) == ((4, 6), (0, 3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_of_a_path_comes_again_as_a_first_row(temperature):
    rows = rows_of([4, 6, 1, 3], TREE)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0))
    rows[2], rows[5] = np.nan, np.nan  # off the path
    assert accept(rows, TREE, sampler, 0, never).path == (0, 3, 5)
    rows[4] = np.nan
    result = accept(rows, TREE, sampler, 0, never)
    assert (result.emitted, result.num_accepted_tokens, result.path) == ((4, 6), 1, (0,))
    rows[0] = np.nan
    with pytest.raises(QuasarError, match="not a finite number"):
        accept(rows, TREE, sampler, 0, never)
