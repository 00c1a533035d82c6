"""Acceptance keeps the target distribution: exact enumeration over the noise, and seeded statistics."""

from __future__ import annotations

import numpy as np
import pytest
from stubs import one_hot_logits

from quasar_trt.drafters.base import NO_DRAFT, Draft
from quasar_trt.errors import QuasarError
from quasar_trt.rejection import accept
from quasar_trt.sampling import ACCEPT, Sampler
from quasar_trt.sampling_params import SamplingParams

GRID = (np.arange(2000) + 0.5) / 2000  # uniforms; integrals over them are good to 1 / 2000


class FixedSampler(Sampler):
    """A sampler whose uniforms are given: one for the ratio test, one for picking."""

    def __init__(self, params: SamplingParams, u_accept: float = 0.0, u_sample: float = 0.0):
        super().__init__(params)
        self.u_accept, self.u_sample = u_accept, u_sample

    def uniform(self, position: int, stream: int) -> float:
        return self.u_accept if stream == ACCEPT else self.u_sample


def never(_token: int) -> bool:
    return False


def log(*p: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p, np.float32))


def softmax(logits, temperature: float) -> np.ndarray:
    weights = np.exp(np.array(logits, np.float64) / temperature)
    return (weights / weights.sum()).astype(np.float32)


def first_token(logits: np.ndarray, drafted: int, q: np.ndarray, sampler: Sampler) -> tuple[int, int]:
    """(emitted token, accepted count) of one drafted token."""
    rows = np.stack([logits, logits]).astype(np.float32)
    result = accept(rows, Draft((drafted,), probs=np.float32(q)[None]), sampler, 0, never)
    return result.emitted[0], result.num_accepted_tokens


def marginal(logits: np.ndarray, q: np.ndarray, drawn_from: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Distribution of the first emitted token by the ratio test, summed over drafted tokens and the grid of uniforms."""
    logits = np.float32(logits)
    sampler = FixedSampler(params)
    found = np.zeros(len(logits))
    for drafted in np.flatnonzero(drawn_from):
        share = drawn_from[drafted] / len(GRID)
        rejecting = []
        for sampler.u_accept in GRID:
            if first_token(logits, drafted, q, sampler)[1]:
                found[drafted] += share
            else:
                rejecting.append(sampler.u_accept)
        if rejecting:
            sampler.u_accept = rejecting[0]
            for sampler.u_sample in GRID:
                found[first_token(logits, drafted, q, sampler)[0]] += share * len(rejecting) / len(GRID)
    return found


def test_one_hot_draft_with_probabilities_keeps_the_target():
    one_hot = np.array([1.0, 0.0, 0.0])
    found = marginal(log(0.6, 0.3, 0.1), one_hot, one_hot, SamplingParams())
    np.testing.assert_allclose(found, [0.6, 0.3, 0.1], atol=1e-3)


def test_ratio_test_with_temperature_keeps_the_target():
    q = softmax([2, 1, 0], 0.5)
    found = marginal([1, 1.5, 0], q, q, SamplingParams(temperature=0.5))
    np.testing.assert_allclose(found, [0.2595, 0.7054, 0.0351], atol=1e-3)


def test_ratio_against_another_distribution_than_the_drawn_one_is_noticed():
    """The enumeration tells a wrong q from a right one: drawn at temperature 1, compared at 0.5."""
    found = marginal([1, 1.5, 0], softmax([2, 1, 0], 0.5), softmax([2, 1, 0], 1.0), SamplingParams(temperature=0.5))
    np.testing.assert_allclose(found, [0.1992, 0.6960, 0.1048], atol=1e-3)


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.7}, {"temperature": 0.7, "top_k": 4, "top_p": 0.8}])
def test_ratio_test_with_filters_keeps_the_target(params):
    generator = np.random.default_rng(5)
    logits = generator.normal(0, 1, 6).astype(np.float32)
    q = softmax(generator.normal(0, 1, 6), 1.0)
    params = SamplingParams(**params)
    expected = Sampler(params).target(logits).dense(6)
    np.testing.assert_allclose(marginal(logits, q, q, params), expected, atol=2e-3)


def test_sample_matching_keeps_the_target():
    """20 000 seeded runs; shares within 0.012 (3.4 standard deviations), of the rejected within 0.02."""
    rows = np.stack([log(0.6, 0.3, 0.1)] * 2)
    results = [accept(rows, Draft((0,)), Sampler(SamplingParams(seed=seed)), 0, never) for seed in range(20000)]
    accepted = np.array([result.num_accepted_tokens for result in results])
    first = np.array([result.emitted[0] for result in results])
    np.testing.assert_allclose(np.bincount(first, minlength=3) / 20000, [0.6, 0.3, 0.1], atol=0.012)
    assert abs(accepted.mean() - 0.6) < 0.012
    rejected = first[accepted == 0]
    np.testing.assert_allclose(np.bincount(rejected, minlength=3) / len(rejected), [0, 0.75, 0.25], atol=0.02)


def test_equality_with_the_argmax_is_not_the_rule():
    """p = [.5, .5], draft 0: 20 000 seeded runs give token 0 a share of .5 +- .012 (3.4 standard deviations)."""
    rows = np.stack([log(0.5, 0.5)] * 2)
    first = [
        accept(rows, Draft((0,)), Sampler(SamplingParams(seed=seed)), 0, never).emitted[0] for seed in range(20000)
    ]
    assert abs(np.mean(first) - 0.5) < 0.012


@pytest.mark.parametrize("probs", [None, [[0.0, 0.0, 1.0]], [[0.2, 0.2, 0.6]]])
def test_token_without_probability_never_passes(probs):
    """top_k keeps tokens 0 and 1; token 2 is drafted and every uniform is 0."""
    rows = np.stack([log(0.5, 0.4, 0.1)] * 2)
    draft = Draft((2,), probs=None if probs is None else np.float32(probs))
    result = accept(rows, draft, FixedSampler(SamplingParams(top_k=2)), 0, never)
    assert result.num_accepted_tokens == 0
    assert len(result.emitted) == 1 and result.emitted[0] in (0, 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53])
def test_equal_distributions_always_accept(u):
    logits = log(0.5, 0.25, 0.25)
    q = Sampler(SamplingParams()).target(logits).dense(3)
    for drafted in range(3):
        assert first_token(logits, drafted, q, FixedSampler(SamplingParams(), u, u)) == (drafted, 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8}])
def test_equal_distributions_always_accept_whatever_their_rounding(params):
    """Probabilities that float32 cannot hold exactly, the largest uniform: every token of q passes."""
    logits = np.random.default_rng(11).normal(0, 2, 50).astype(np.float32)
    sampler = FixedSampler(SamplingParams(**params), 1.0 - 2.0**-53)
    q = sampler.target(logits).dense(50)
    for drafted in np.flatnonzero(q):
        assert first_token(logits, drafted, q, sampler) == (drafted, 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("u_sample", "expected"), [(0.1, (0, 1)), (0.9, (1, 0))])
def test_distributions_that_differ_by_rounding_only_give_a_token_of_p(u_sample, expected):
    """q is p plus one rounding step everywhere, so the residual is empty: p stands in, and may give the drafted token."""
    logits = log(0.3, 0.7)
    q = np.nextafter(Sampler(SamplingParams()).target(logits).dense(2), np.float32(1))
    assert first_token(logits, 0, q, FixedSampler(SamplingParams(), 1.0 - 2.0**-53, u_sample)) == expected


def test_recovered_token_differs_from_the_drafted_one():
    generator = np.random.default_rng(12)
    for _ in range(100):
        logits = generator.normal(0, 1, 8).astype(np.float32)
        q = softmax(generator.normal(0, 1, 8), 1.0)
        for drafted in range(8):
            sampler = FixedSampler(SamplingParams(), 1.0 - 2.0**-53, generator.random())
            token, accepted = first_token(logits, drafted, q, sampler)
            assert (token == drafted) == (accepted == 1) == (sampler.target(logits).probability(drafted) >= q[drafted])


@pytest.mark.parametrize("drafted", [0, 1, 2])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}])
def test_top_1_is_greedy_whatever_is_drafted(params, drafted):
    logits = log(0.3, 0.5, 0.2)
    for u in (0.0, 0.5, 1.0 - 2.0**-53):
        sampler = FixedSampler(SamplingParams(**params), u, u)
        assert first_token(logits, drafted, np.float32([0.6, 0.3, 0.1]), sampler)[0] == 1
        assert accept(np.stack([logits] * 2), Draft((drafted,)), sampler, 0, never).emitted[0] == 1


@pytest.mark.parametrize(
    ("name", "chain", "drafted", "emitted", "accepted"),
    [
        ("perfect match", [3, 4, 5, 6], [3, 4, 5], (3, 4, 5, 6), 3),
        ("early mismatch", [3, 4, 5, 6], [9, 4, 5], (3,), 0),
        ("agreement after a mismatch does not count", [3, 4, 5, 6], [3, 9, 5], (3, 4), 1),
        ("empty draft", [0], [], (0,), 0),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_probs", [False, True])
def test_accepted_tokens_are_a_prefix(name, chain, drafted, emitted, accepted, temperature, with_probs):
    rows = np.stack([one_hot_logits(token, 10) for token in chain])
    probs = np.stack([np.eye(10, dtype=np.float32)[token] for token in drafted]) if with_probs and drafted else None
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0))
    result = accept(rows, Draft(tuple(drafted), probs=probs), sampler, 5, never)
    assert (result.emitted, result.num_accepted_tokens) == (emitted, accepted), name


def test_nothing_is_emitted_after_a_finishing_token():
    rows = np.stack([one_hot_logits(token, 10) for token in (4, 5, 2, 9, 9)])
    result = accept(rows, Draft((4, 5, 2, 9)), Sampler(SamplingParams(temperature=0)), 0, lambda token: token == 2)
    assert (result.emitted, result.num_accepted_tokens) == ((4, 5, 2), 3)


@pytest.mark.parametrize(("drafted", "seen"), [((4, 5), [4, 5, 6]), ((4, 9), [4, 5]), ((), [4])])
def test_finishes_is_asked_about_each_emitted_token_in_turn(drafted, seen):
    asked = []
    rows = np.stack([one_hot_logits(token, 10) for token in (4, 5, 6)])
    accept(rows, Draft(drafted), Sampler(SamplingParams(temperature=0)), 0, asked.append)
    assert asked == seen


def test_rejected_draft_token_may_be_followed_by_the_end():
    rows = np.stack([one_hot_logits(token, 10) for token in (4, 5, 6)])
    result = accept(rows, Draft((4, 9)), Sampler(SamplingParams(temperature=0)), 0, lambda token: token == 5)
    assert (result.emitted, result.num_accepted_tokens) == ((4, 5), 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_after_the_first_mismatch_are_not_looked_at(temperature):
    rows = np.stack([one_hot_logits(3, 10), np.full(10, np.nan, np.float32)])
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0))
    assert accept(rows, Draft((4,)), sampler, 0, never).emitted == (3,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_probs", [False, True])
def test_bad_row_is_an_error_only_as_the_first_row(temperature, with_probs):
    """Before it, the tokens are emitted; the last of them is to come again, so that the bad row is the next first row."""
    rows = np.stack([one_hot_logits(token, 10) for token in (3, 4, 5, 6)])
    probs = np.eye(10, dtype=np.float32)[[3, 4, 5]] if with_probs else None
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0))
    for bad in (1, 2, 3):
        damaged = rows.copy()
        damaged[bad, 7] = np.nan
        result = accept(damaged, Draft((3, 4, 5), probs=probs), sampler, 0, never)
        assert (result.emitted, result.num_accepted_tokens) == ((3, 4, 5)[:bad], bad - 1)
        with pytest.raises(QuasarError, match="not a finite number"):
            accept(damaged[bad:], NO_DRAFT, sampler, bad, never)


def test_tokens_equal_those_without_a_draft():
    """Each position's token is the one that plain decoding samples there."""
    rows = np.random.default_rng(2).normal(0, 1, (6, 50)).astype(np.float32)
    sampler = Sampler(SamplingParams(seed=4))
    plain = tuple(accept(rows[i : i + 1], NO_DRAFT, sampler, 10 + i, never).emitted[0] for i in range(6))
    assert accept(rows, Draft(plain[:5]), sampler, 10, never).emitted == plain
    wrong = (plain[0], plain[1], (plain[2] + 1) % 50, 0, 0)
    assert accept(rows, Draft(wrong), sampler, 10, never).emitted == plain[:3]
