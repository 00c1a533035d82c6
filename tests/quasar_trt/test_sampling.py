"""Target distributions, the inverse CDF and keyed noise, against plain float64 versions."""

from __future__ import annotations

import numpy as np
import pytest

from quasar_trt.errors import QuasarError
from quasar_trt.sampling import ACCEPT, SAMPLE, Sampler, Target, uniform
from quasar_trt.sampling_params import SamplingParams


def plain_target(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """p by the definition: one stable sort, float64."""
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max()) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled)
    if 0 < params.top_k < len(p):
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p - 1e-12]] = 0.0  # 1e-12: float64 rounding of the sum, tables end exactly on top_p
    return p / p.sum()


def target(logits, **params) -> np.ndarray:
    row = np.asarray(logits, np.float32)
    return Sampler(SamplingParams(**params)).target(row).dense(len(row))


def log(*p: float) -> np.ndarray:
    return np.log(np.array(p, np.float32))


@pytest.mark.parametrize(
    ("name", "logits", "params", "expected"),
    [
        ("softmax", log(0.6, 0.3, 0.1), {}, [0.6, 0.3, 0.1]),
        ("temperature", [1, 1.5, 0], {"temperature": 0.5}, [0.2595, 0.7054, 0.0351]),
        ("top_k", log(0.5, 0.3, 0.2), {"top_k": 2}, [0.625, 0.375, 0]),
        ("top_k of more than all", log(0.5, 0.3, 0.2), {"top_k": 7}, [0.5, 0.3, 0.2]),
        ("top_k -1 keeps all", log(0.5, 0.3, 0.2), {"top_k": -1}, [0.5, 0.3, 0.2]),
        ("top_k tie at the border", [1, 3, 1, 1], {"top_k": 2}, [0.1192, 0.8808, 0, 0]),
        ("top_p cuts behind the border token", log(0.5, 0.3, 0.2), {"top_p": 0.6}, [0.625, 0.375, 0]),
        ("top_p of one token", log(0.2, 0.5, 0.3), {"top_p": 0.01}, [0, 1, 0]),
        ("top_p tie at the border", [0, 0, 0, 0], {"top_p": 0.4}, [0.5, 0.5, 0, 0]),
        ("top_p after top_k", log(0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),
        ("top_p after temperature", log(0.5, 0.3, 0.2), {"temperature": 0.5, "top_p": 0.6}, [1, 0, 0]),
        ("masked ids", [1, -np.inf, 1], {}, [0.5, 0, 0.5]),
        ("tiny temperature", [1, 1.0001, 0], {"temperature": 1e-40}, [0, 1, 0]),
        ("huge temperature", [5, -5], {"temperature": 1e9}, [0.5, 0.5]),
        ("largest temperature with a masked id", [1, -np.inf, 2], {"temperature": 1.7e308}, [0.5, 0, 0.5]),
        ("smallest temperature with a masked id", [1, -np.inf, 2], {"temperature": 5e-324}, [0, 0, 1]),
        ("lowest float", [0, np.finfo(np.float32).min], {"temperature": 0.1}, [1, 0]),
    ],
)
def test_target_distribution(name, logits, params, expected):
    np.testing.assert_allclose(target(logits, **params), expected, atol=5e-5, err_msg=name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 7}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.5}, {"temperature": 2.5}]
)
@pytest.mark.parametrize(("vocab", "spread"), [(5, 1.0), (256, 3.0), (1000, 0.01), (4099, 6.0)])
def test_target_equals_plain_sort(params, vocab, spread):
    logits = np.random.default_rng(vocab).normal(0, spread, vocab).astype(np.float32)
    expected = plain_target(logits, SamplingParams(**params))
    np.testing.assert_allclose(target(logits, **params), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("vocab", [1, 3, 256, 257, 1000])
def test_pick_is_the_inverse_cdf_in_id_order(vocab):
    generator = np.random.default_rng(vocab)
    weights = generator.random(vocab).astype(np.float32)
    weights[generator.random(vocab) < 0.3] = 0.0
    weights[vocab // 2] = 1.0
    cumulative = np.cumsum(weights.astype(np.float64))
    edges = cumulative / cumulative[-1]
    for u in generator.random(500):
        if np.abs(edges - u).min() > 1e-6:  # float32 block sums may move an edge by their rounding
            assert Target(weights).pick(u) == np.searchsorted(edges, u, side="right")


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53])
def test_zero_probability_is_never_picked(u):
    weights = np.zeros(700, np.float32)
    weights[[300, 301]] = 0.1, 0.3
    assert Target(weights).pick(u) in (300, 301)
    assert Target(weights[300:302], np.array([5, 9])).pick(u) in (5, 9)


def test_probability_of_a_token():
    sampler = Sampler(SamplingParams(top_k=2))
    p = sampler.target(log(0.5, 0.2, 0.3))
    assert [round(p.probability(token), 4) for token in range(3)] == [0.625, 0.0, 0.375]


def test_probability_is_rounded_as_in_the_dense_target():
    row = np.random.default_rng(8).normal(0, 3, 300).astype(np.float32)
    for params in ({}, {"top_k": 40, "top_p": 0.9}):
        p = Sampler(SamplingParams(**params)).target(row)
        assert [p.probability(token) for token in range(300)] == p.dense(300).tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e38, 1e46, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_masked_id_is_never_sampled_however_hot(temperature, filters):
    row = np.float32([-np.inf, 3, -np.inf, 1, 2, -np.inf])
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0, **filters))
    assert {sampler.sample(row, position) for position in range(200)} == {1, 3, 4}


def test_greedy_takes_the_lowest_of_equal_maxima():
    assert Sampler(SamplingParams(temperature=0)).sample(np.float32([0, 1, 7, 1, 2, 7]), 0) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[0, np.nan, 1], [-np.inf] * 3, [0, np.inf, 1]])
def test_row_without_finite_maximum_is_refused(temperature, row):
    with pytest.raises(QuasarError, match="not a finite number"):
        Sampler(SamplingParams(temperature=temperature)).sample(np.float32(row), 0)


def test_noise_is_a_function_of_every_part_of_its_key():
    assert uniform(7, 0, 3, SAMPLE) == uniform(7, 0, 3, SAMPLE)
    keys = [
        (7, 0, 3, SAMPLE),
        (8, 0, 3, SAMPLE),
        (7, 1, 3, SAMPLE),
        (7, 0, 4, SAMPLE),
        (7, 0, 3, ACCEPT),
        (-7, 0, 3, SAMPLE),
    ]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_noise_is_uniform():
    """20 000 positions of one seed: each tenth holds 0.1 +- 0.01 of them (4.7 standard deviations)."""
    u = np.array([uniform(0, 0, position, SAMPLE) for position in range(20000)])
    assert u.min() >= 0.0 and u.max() < 1.0
    np.testing.assert_allclose(np.histogram(u, 10, (0, 1))[0] / 20000, 0.1, atol=0.01)


def test_samples_follow_the_target():
    """20 000 seeded draws; shares within 0.012 (3.4 standard deviations)."""
    sampler = Sampler(SamplingParams(seed=1))
    tokens = [sampler.sample(log(0.6, 0.3, 0.1), position) for position in range(20000)]
    np.testing.assert_allclose(np.bincount(tokens, minlength=3) / 20000, [0.6, 0.3, 0.1], atol=0.012)


def test_token_does_not_depend_on_rows_sampled_before():
    rows = np.random.default_rng(0).normal(0, 1, (4, 500)).astype(np.float32)
    sampler = Sampler(SamplingParams(seed=3, top_p=0.9))
    in_order = [sampler.sample(row, position) for position, row in enumerate(rows)]
    alone = [
        Sampler(SamplingParams(seed=3, top_p=0.9)).sample(rows[position].copy(), position) for position in (3, 2, 1, 0)
    ]
    assert in_order == alone[::-1]


def test_seed_zero_is_a_seed_and_none_is_fresh():
    row = np.zeros(2**15, np.float32)

    def draw(seed):
        return Sampler(SamplingParams(seed=seed)).sample(row, 0)

    assert draw(0) == draw(0)
    assert len({draw(None) for _ in range(4)}) > 1


def test_samples_of_one_seed_differ():
    row = np.zeros(2**15, np.float32)
    assert len({Sampler(SamplingParams(seed=5), index).sample(row, 0) for index in range(4)}) == 4
