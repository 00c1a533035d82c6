"""Heads are asked while that pays, by costs and by what was accepted."""

from __future__ import annotations

import pytest
from heads import eagle_tensors, eagle_values, medusa_tensors, write_eagle, write_medusa
from tiny import random_ids

from quasar_trt.drafters import head_passes
from quasar_trt.drafters.confidence import RankEstimates
from quasar_trt.drafters.drafting_passes import DraftingPasses
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.step_cost import StepCost


class Fixed(StepCost):
    """Costs that stay as they are."""

    def observe(self, rows, seconds):
        pass


@pytest.fixture
def costs(monkeypatch):
    """Seconds of a verifier's pass -> its costs, beside which those of a head are a millisecond."""

    def made(seconds: float) -> StepCost:
        monkeypatch.setattr(head_passes, "compare", lambda *passes: 1e-3 / seconds)
        return Fixed({1: seconds, 64: 1.0001 * seconds})

    return made


def head_dir(directory, config, kind: str):
    if kind == "medusa":
        return write_medusa(directory, medusa_tensors(config, 3, 1), 3, 1)
    values = eagle_values(config, hidden_size=42, draft_vocab_size=90)
    return write_eagle(directory, values, eagle_tensors(config, True, values))


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("verify_seconds", [1e-7, 1e3])
def test_a_head_is_asked_only_where_its_passes_cost_little_beside_the_verifiers(
    deep_dirs, tmp_path, costs, kind, verify_seconds
):
    """Random heads are nearly never right: beside a pass that takes a microsecond they lose, beside one of a quarter of an hour, of
    however many rows, any hope is worth their time."""
    engine = open_engine(deep_dirs["BF16"], "cpu", threads=1)
    drafter = make_drafter(f"{kind}:{head_dir(tmp_path / 'head', engine.config, kind)}")
    runner = Runner(engine, drafter=drafter, max_draft_len=7, step_cost=costs(verify_seconds))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = runner.generate([random_ids(engine.config, 6)], params)[0].outputs[0].token_ids
    assert found == Runner(engine).generate([random_ids(engine.config, 6)], params)[0].outputs[0].token_ids
    stats = runner.stats
    assert stats.num_drafts == 0 if verify_seconds < 1 else stats.num_drafts > 0.9 * stats.num_verify_steps - 2


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_an_engine_of_short_sequences_is_drafted_for_too(deep_dirs, tmp_path, kind):
    """Of fewer tokens than the rows of which a head's passes are measured."""
    engine = open_engine(deep_dirs["BF16"], "reference")
    engine.max_seq_len = 20
    drafter = make_drafter(f"{kind}:{head_dir(tmp_path / 'head', engine.config, kind)}")
    runner = Runner(engine, drafter=drafter, max_draft_len=7, step_cost=Fixed({1: 1e3, 64: 1.0001e3}))
    params = SamplingParams(temperature=0, ignore_eos=True)
    found = runner.generate([random_ids(engine.config, 6)], params)[0].outputs[0].token_ids
    assert found == Runner(engine).generate([random_ids(engine.config, 6)], params)[0].outputs[0].token_ids
    assert len(found) == 14 and runner.stats.num_draft_tokens


@pytest.mark.parametrize("pays", [True, False])
def test_a_long_text_is_read_as_it_comes_or_but_for_its_end_forgotten(deep_dirs, tmp_path, costs, pays):
    """States of 256 tokens wait at most."""
    engine = open_engine(deep_dirs["BF16"], "reference")
    engine.max_seq_len = 600
    drafter = make_drafter(f"eagle:{head_dir(tmp_path / 'head', engine.config, 'eagle')}")
    runner = Runner(engine, drafter=drafter, max_draft_len=3, step_cost=costs(1e3 if pays else 1e-7))
    waiting = []
    given = drafter.propose

    def propose(batch):
        waiting.extend(text.num_pending for text in drafter._texts.values())
        drafts = given(batch)
        waiting.extend(text.num_read for text in drafter._texts.values())
        return drafts

    drafter.propose = propose
    params = SamplingParams(temperature=0, max_tokens=290, ignore_eos=True)
    prompt = random_ids(engine.config, 300)
    found = runner.generate([prompt], params)[0].outputs[0].token_ids
    assert found == Runner(engine).generate([prompt], params)[0].outputs[0].token_ids
    assert max(waiting[::2]) <= 256
    most_read = max(waiting[1::2])
    assert most_read > 550 if pays else most_read <= 300


def test_a_pass_is_worth_what_its_tokens_save():
    """Two rows cost as much as one; the pass takes a tenth of the verifier's: it pays from a chance of a tenth on."""
    passes = DraftingPasses(StepCost({1: 1.0, 2: 1.0}), StepCost({1: 0.1, 2: 0.1}), 0.1)
    for chance, worth in ((0.09, False), (0.11, True)):
        passes.begin()
        assert passes.is_worth([[]], [[chance]], 0.1) == worth
        assert passes.seconds == pytest.approx(0.1 * worth)
    assert not passes.is_worth([[0.11]], [[0.11, 0.05]], 0.1)  # the second, of the same step
    assert passes.is_worth([[0.11]], [[0.11, 0.5]], 0.1)
    assert passes.seconds == pytest.approx(0.2)


def test_ranks_are_learned_by_depth():
    ranks = RankEstimates(2, 3)
    before = ranks.of(1, 0)
    for _ in range(200):
        ranks.count(0, 0, False)
        ranks.count(0, 2, True)
    assert ranks.of(0, 0) < 0.02 and ranks.of(0, 2) > 0.9 and ranks.of(1, 0) == before
