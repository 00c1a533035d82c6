"""Draft lengths: the best ones for a table of costs, and what wrong beliefs may cost; time is simulated."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from stubs import StubDrafter, StubEngine, perfect_rule, random_logits
from tiny import random_ids, tiny_checkpoint

from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.draft_length import DraftLengths
from quasar_trt.drafters.base import NO_DRAFT, Draft, DraftRequest
from quasar_trt.drafters.estimates import AcceptanceEstimates
from quasar_trt.drafters.registry import DRAFTERS, OPERANDS, make_drafter
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.recipe import Recipe
from quasar_trt.runner import Runner
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.step_cost import StepCost, measure

SAMPLER = Sampler(SamplingParams())
ALONE = [name for name in DRAFTERS if name not in OPERANDS]
FLAT = {rows: 0.003 * (1 + 0.05 * (rows - 1)) for rows in range(1, 65)}  # seconds; a row more costs 5 % of a plain pass
LINEAR = {rows: 0.003 * rows for rows in range(1, 65)}


def draft(*estimates: float) -> Draft:
    return Draft(tuple(range(len(estimates))), estimates=estimates)


def expected_tokens(drafts, lengths) -> float:
    return sum(
        math.prod(d.estimates[: k + 1]) for d, length in zip(drafts, lengths, strict=True) for k in range(length)
    )


@pytest.fixture
def no_trials(monkeypatch):
    monkeypatch.setattr("quasar_trt.trials._SHARE", 0.0)


@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_lengths_are_the_best_of_all(num_requests, no_trials):
    """200 random tables and drafts; every combination of lengths within the free rows is tried."""
    generator = np.random.default_rng(num_requests)
    lengths_seen = set()
    for _ in range(200):
        steps = generator.choice([0.0, 0.02, 0.1, 0.4, 1.5], 16) * generator.random(16)
        table = dict(enumerate(1 + np.cumsum(steps), 1))
        cost = StepCost(table)
        drafts = [draft(*generator.random(generator.integers(0, 5))) for _ in range(num_requests)]
        free = int(generator.integers(0, 8))

        def rate(lengths, drafts=drafts, cost=cost):
            return (num_requests + expected_tokens(drafts, lengths)) / cost.seconds(num_requests + sum(lengths))

        every = itertools.product(*(range(len(d) + 1) for d in drafts))
        best = max(rate(lengths) for lengths in every if sum(lengths) <= free)
        chosen = DraftLengths(cost).choose(drafts, num_requests, num_requests, free)
        assert sum(chosen) <= free
        assert rate(chosen) == pytest.approx(best, rel=1e-12)
        lengths_seen.add(sum(chosen))
    assert len(lengths_seen) > 4


def test_rows_go_where_the_most_is_expected():
    drafts = [draft(0.5, 0.9), draft(0.9, 0.9, 0.1), NO_DRAFT, draft(0.7)]
    assert DraftLengths(None).choose(drafts, 4, 4, free=3) == [0, 2, 0, 1]
    assert DraftLengths(StepCost(FLAT)).choose(drafts, 4, 4, free=3) == [0, 2, 0, 1]


def test_without_costs_and_estimates_rows_are_shared_evenly():
    drafts = [Draft((1, 2, 3)), Draft((1, 2, 3)), Draft((1,))]
    assert DraftLengths(None).choose(drafts, 3, 3, free=5) == [2, 2, 1]
    assert DraftLengths(None).choose(drafts, 3, 3, free=50) == [3, 3, 1]
    assert DraftLengths(StepCost(FLAT)).choose(drafts, 3, 3, free=50) == [3, 3, 1]  # certain tokens pay


def test_chunk_of_another_prompt_does_not_make_drafts_seem_cheap(no_trials):
    """Where each further row costs the same, the lengths are those of a pass without the prompt."""
    table = {1: 1.0, 2: 1.3, 64: 1.0 + 0.3 * 63}
    for estimate in (0.1, 0.25, 0.35, 0.9):
        one = DraftLengths(StepCost(table)).choose([draft(estimate)], 1, 1, free=5)
        assert DraftLengths(StepCost(table)).choose([draft(estimate)], 41, 1, free=5) == one == [int(estimate > 0.3)]


def test_nothing_is_drafted_where_rows_cost_as_much_as_passes():
    """Trials take at most half a percent of the time, and every length gets its turn."""
    cost = StepCost(LINEAR)
    lengths = DraftLengths(cost)
    used = [lengths.choose([draft(*[0.5] * 8)], 1, 1, free=20)[0] for _ in range(20_000)]
    spent = sum(cost.seconds(1 + k) - cost.seconds(1) for k in used)
    assert 0.004 < spent / sum(cost.seconds(1 + k) for k in used) <= 0.005
    assert set(used) == set(range(9))


def test_trials_mend_a_cost_that_was_measured_too_high():
    """Draft tokens that are right at 0.3 each; passes with drafts were measured 1.5 times as slow as they are."""
    cost = StepCost({rows: seconds * (1.5 if rows > 1 else 1) for rows, seconds in FLAT.items()})
    lengths = DraftLengths(cost)
    used = []
    for _ in range(10_000):
        (length,) = lengths.choose([draft(*[0.3] * 4)], 1, 1, free=20)
        cost.observe(1 + length, FLAT[1 + length])
        used.append(length)
    assert np.mean(used[:100]) < 0.1 and np.mean(used[-1000:]) > 0.9


def test_what_drafts_have_cost_makes_more_of_their_tokens_worth_verifying():
    """Rows cost a second each, so nothing pays; it does when 3 seconds have gone into the drafts."""
    table = {rows: float(rows) for rows in range(1, 12)}
    drafts = [draft(*[0.9] * 8)]
    assert DraftLengths(StepCost(table)).choose(drafts, 1, 1, free=20) == [0]
    spent = DraftLengths(StepCost(table)).choose(drafts, 1, 1, 20, 3.0)
    rates = [sum(0.9**depth for depth in range(count + 1)) / (4.0 + count) for count in range(9)]
    assert spent == [int(np.argmax(rates))] and spent[0] > 2


def test_certain_tokens_are_verified_whatever_they_cost():
    table = {rows: float(rows**3) for rows in range(1, 12)}
    assert DraftLengths(StepCost(table)).choose([draft(1.0, 1.0, 1.0, 0.9), draft(1.0)], 2, 2, free=20) == [3, 1]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("alphabet", [2, 50, 10_000])
@pytest.mark.parametrize("table", [FLAT, LINEAR], ids=["flat", "linear"])
def test_random_ids_take_at_most_two_percent_longer_than_plain(name, alphabet, table):
    """Two texts of 3 000 random ids after prompts of 50, time by the table."""
    generator = np.random.default_rng(alphabet)
    drafter = make_drafter(name)
    cost = StepCost(table)
    lengths = DraftLengths(cost)
    seconds = num_emitted = 0
    for request_id in range(2):
        text = generator.integers(0, alphabet, 3050).tolist()
        context = text[:50]
        drafter.start(request_id, context)
        while len(context) < len(text) - 20:
            (proposed,) = drafter.propose([DraftRequest(request_id, context, 16, SAMPLER)])
            (length,) = lengths.choose([proposed], 1, 1, free=200)
            seconds += table[1 + length]
            cost.observe(1 + length, table[1 + length])
            num_accepted = 0
            while num_accepted < length and proposed.ids[num_accepted] == text[len(context) + num_accepted]:
                num_accepted += 1
            num_emitted += num_accepted + 1
            context += text[len(context) : len(context) + num_accepted + 1]
            drafter.observe(request_id, context[-num_accepted - 1 :], num_accepted)
        drafter.stop(request_id)
    assert seconds <= 1.02 * num_emitted * table[1]


def test_estimates_tend_to_the_share_that_is_right():
    """Three kinds at 0.1, 0.5 and 0.95, 3 000 answers each: the mean of the last 2 000 estimates within 0.02."""
    generator = np.random.default_rng(0)
    shares = (0.1, 0.5, 0.95)
    estimates = AcceptanceEstimates([0.5, 0.9, 0.2])
    assert estimates.of == [0.5, 0.9, 0.2]
    history = []
    for _ in range(3000):
        for kind, share in enumerate(shares):
            estimates.count(kind, bool(generator.random() < share))
        history.append(list(estimates.of))
    np.testing.assert_allclose(np.mean(history[1000:], axis=0), shares, atol=0.02)


def test_estimates_follow_a_change():
    estimates = AcceptanceEstimates([0.5])
    for right in [True] * 1000 + [False] * 100:
        estimates.count(0, right)
    assert estimates.of[0] < 0.4


# --- in a runner


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("table", [FLAT, LINEAR, {1: 1.0, 2: 9.0, 3: 1.0}], ids=["flat", "linear", "odd"])
@pytest.mark.parametrize("name", [*ALONE, "suffix with history"])
def test_ids_do_not_depend_on_costs(name, table, temperature):
    logits = random_logits(5, seed=1)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    prompts = [[1, 2, 1], [4], [2, 2, 3, 2, 2]] * 2

    def generate(**options):
        runner = Runner(StubEngine(logits, 5, max_rows=24), max_batch_size=3, **options)
        return [output.outputs[0].token_ids for output in runner.generate(prompts, params)], runner.stats

    options = {"history_tokens": 50} if name == "suffix with history" else {}
    plain, _ = generate()
    drafted, stats = generate(drafter=make_drafter(name.split()[0], options), step_cost=StepCost(table))
    assert drafted == plain
    assert stats.num_draft_tokens > 0 or table is LINEAR


def test_draft_that_does_not_pay_is_not_verified():
    class Doubtful(StubDrafter):
        def propose(self, batch):
            return [Draft(each.ids, estimates=(0.9, 0.01, 0.01)[: len(each)]) for each in super().propose(batch)]

    logits = random_logits(5)
    engine = StubEngine(logits, 5)
    runner = Runner(engine, drafter=Doubtful(perfect_rule(logits), 3), step_cost=StepCost(FLAT))
    runner.generate([1, 2], SamplingParams(temperature=0, max_tokens=20))
    assert [len(step.drafts[0]) for step in engine.passes[:9]] == [1] * 9


@pytest.fixture(scope="module", params=["bf16", "int8"])
def engine(request, tmp_path_factory) -> CpuEngine:
    config, recipe, tensors = tiny_checkpoint(3, Recipe("none" if request.param == "bf16" else "int8"))
    path = tmp_path_factory.mktemp("packed") / "rank0.engine"
    compile_cpu(config, recipe, tensors, path)
    return CpuEngine(path, max_seq_len=256, threads=1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafted_ids_equal_plain_ids_on_the_native_engine(engine, temperature):
    """Four requests in passes of up to three, lengths chosen by costs that favour drafts, that forbid them, and none."""
    params = [SamplingParams(temperature=temperature, top_k=2, seed=seed, max_tokens=40) for seed in range(4)]
    prompts = [random_ids(engine.config, count, seed=count) * 2 for count in (1, 4, 9, 17)]

    def generate(**options):
        runner = Runner(engine, max_batch_size=3, **options)
        return [output.outputs[0].token_ids for output in runner.generate(prompts, params)], runner.stats

    plain, _ = generate()
    num_accepted = {}
    for (name, options), (kind, table) in itertools.product(
        [("suffix", {}), ("suffix", {"history_tokens": 100}), ("ngram", {}), ("ngram", {"num_speculative_tokens": 2})],
        [("flat", FLAT), ("linear", LINEAR), ("measured", measure(engine, 16)[0]), ("none", None)],
    ):
        cost = None if table is None else StepCost(table)
        drafted, stats = generate(drafter=make_drafter(name, options), step_cost=cost)
        assert drafted == plain, (name, options, kind)
        num_accepted[kind] = num_accepted.get(kind, 0) + stats.num_accepted_tokens
    assert num_accepted["none"] >= num_accepted["flat"] > 0
