"""Blocks of a drafting engine: made while they pay, by known costs and estimates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quasar_trt.drafters.agreement import ANY, Agreement
from quasar_trt.drafters.base import NO_DRAFT, Draft
from quasar_trt.drafters.block_lengths import BlockLengths
from quasar_trt.drafters.engine_block import Block
from quasar_trt.step_cost import StepCost

VERIFIER = {1: 1.0, 5: 1.1, 9: 1.25, 17: 1.7}
HALF = {rows: 0.5 * seconds for rows, seconds in VERIFIER.items()}


def block(limit=16, tail=NO_DRAFT, num_tested=0, kinds=()) -> Block:
    request = SimpleNamespace(limit=limit)
    sequence = SimpleNamespace(cached=[1])
    made = Block(request, sequence, [1, 2], None, list(kinds), list(kinds), tail=tail, num_tested=num_tested)
    return made


def agreement(share: float) -> Agreement:
    made = Agreement()
    made.of[:] = [share] * (ANY + 1)
    return made


def block_length(share: float, drafting: dict[int, float], limit: int = 16) -> int:
    """How many tokens a drafting engine without a drafter writes."""
    lengths = BlockLengths(StepCost(VERIFIER), StepCost(drafting), drafting[1])
    lengths.begin()
    count = 0
    while count < limit and lengths.pays([block(limit, kinds=[0] * count)], agreement(share)):
        count += 1
    assert lengths.seconds == pytest.approx(count * drafting[1])
    return count


@pytest.mark.parametrize(("share", "cost"), [(0.99, 0.5), (0.9, 0.5), (0.7, 0.5), (0.9, 0.2), (0.3, 0.5), (0.99, 1.1)])
def test_length_is_the_best_one(share, cost):
    """Against the length with the most expected tokens per second, found by trying all."""
    verify = StepCost(VERIFIER)
    rates = [sum(share**i for i in range(n + 1)) / (n * cost + verify.seconds(1 + n)) for n in range(17)]
    drafting = {rows: cost * seconds for rows, seconds in VERIFIER.items()}
    assert block_length(share, drafting) == rates.index(max(rates))


def test_a_tail_that_is_nearly_certain_is_better_than_a_pass():
    tail = Draft((1,) * 8, estimates=(0.97,) * 8)
    lengths = BlockLengths(StepCost(VERIFIER), StepCost(HALF), 0.5)
    assert not lengths.pays([block(limit=8, tail=tail, num_tested=7)], agreement(0.97))
    doubtful = Draft((1,) * 8, estimates=(0.5,) * 8)
    assert lengths.pays([block(limit=8, tail=doubtful, num_tested=2)], agreement(0.97))


def test_requests_share_the_cost_of_a_pass():
    """A pass costs as much as the verifier's: it pays for none alone, and for eight together."""
    verify = StepCost({1: 1.0, 200: 1.2})
    draft = StepCost({1: 1.0, 200: 1.2})
    lengths = BlockLengths(verify, draft, 1.0)
    assert not lengths.pays([block()], agreement(0.9))
    lengths = BlockLengths(verify, StepCost({1: 0.5, 200: 0.6}), 0.5)
    blocks = [block(), block(), block(), block()]
    for each in blocks[1:]:
        each.goes_on = False
    assert not lengths.pays(blocks, agreement(0.9))  # one of four
    for each in blocks:
        each.goes_on = True
    assert lengths.pays(blocks, agreement(0.9))


def test_what_does_not_seem_to_pay_is_tried_at_times():
    lengths = BlockLengths(StepCost(VERIFIER), StepCost(HALF), 0.5)
    tried = 0
    for _ in range(10_000):
        lengths.begin()
        tried += lengths.pays([block()], agreement(0.01))
    assert tried * 0.5 == pytest.approx(0.005 * 10_000, rel=0.1)


def test_costs_of_a_drafting_engine_follow_the_verifiers_and_the_measured_ratio():
    """Its table was measured while the machine was busy, three times too high; then the machine gets twice as slow."""
    verify, draft = StepCost(VERIFIER), StepCost({rows: 3 * seconds for rows, seconds in HALF.items()})
    lengths = BlockLengths(verify, draft, 0.5)
    assert draft.seconds(1) == pytest.approx(0.5) and draft.seconds(9) == pytest.approx(0.5 * VERIFIER[9])
    verify.level *= 2.0
    lengths.begin()
    assert draft.seconds(1) == pytest.approx(1.0)
    lengths.begin()
    assert draft.seconds(1) == pytest.approx(1.0)
