"""Trees on the engine of plans: what their rows see, and what is left of them in the slots, by way of the interpreted network."""

from __future__ import annotations

import numpy as np
import pytest
from plan_double import TensorRTDouble
from tiny import random_ids
from tiny_plan import MODEL, assert_same_logits, double, entry, open_double, reference_engine, steps

from quasar_trt.drafters.base import Draft
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.plan_bindings import INPUT_IDS
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

FORK = (-1, -1, 1)  # of three tokens, as many as the plan's limits say; the second leads to the third


@pytest.fixture(params=["tensorrt", "tensorrt_rtx"])
def trt(request) -> TensorRTDouble:
    return double(rtx=request.param == "tensorrt_rtx")


@pytest.fixture
def engine(trt, tmp_path):
    return open_double(trt, tmp_path)


@pytest.fixture
def reference():
    return reference_engine()


def test_trees_chains_and_prompts_in_one_step_give_the_logits_of_the_reference_engine(engine, reference):
    for each in (engine, reference):
        for _ in range(3):
            each.open()
    script = [
        ([entry(0, 11, seed=1), entry(1, 4, seed=2), entry(2, 1, seed=3)], [0, 0, 0]),
        ([entry(2, 1, seed=4, parents=FORK), entry(0, 1, 3, seed=5)], [(1, 2), 2]),
        ([entry(1, 1, seed=6, parents=FORK), entry(0, 1, seed=7, parents=(-1, 0, 0))], [(1,), (0, 2)]),
        ([entry(0, 2, seed=8, parents=(-1, -1)), entry(2, 1, seed=9)], [(), 0]),
        # a tree behind a prompt, and one that is longer than the plan's drafts
        ([entry(1, 8, seed=10, parents=(-1, -1, 1, 1, 3)), entry(2, 1, 2, seed=11)], [(1, 3, 4), 1]),
        ([entry(2, 1, seed=12, parents=(-1, 0, -1, 2, 2, 4, 5))], [(2, 4, 5, 6)]),
        ([entry(0, 1, 1, seed=13), entry(1, 1, 1, seed=14), entry(2, 1, 1, seed=15)], [1, 1, 1]),
    ]
    for batch, kept in script:
        keep = lambda index, drafted, kept=kept: kept[index]  # noqa: E731
        assert_same_logits(steps(engine, batch, keep), steps(reference, batch, keep))
        assert [engine.length(handle) for handle in range(3)] == [reference.length(handle) for handle in range(3)]


def test_all_rows_of_a_tree_are_in_the_last_pass_of_its_sequence(engine, reference, trt):
    for each in (engine, reference):
        each.open()
    batch = [entry(0, 8, seed=1, parents=(-1, -1, 0, 1, 2))]  # 13 rows, 10 of them in a pass
    keep = lambda index, drafted: (0, 2, 4)  # noqa: E731
    assert_same_logits(steps(engine, batch, keep), steps(reference, batch, keep))
    assert [shapes[INPUT_IDS] for shapes in trt.passes] == [(1, 8), (1, 5)]
    assert_same_logits(steps(engine, [entry(0, 1, 2, seed=2)]), steps(reference, [entry(0, 1, 2, seed=2)]))
    parents = (*range(-1, 9), -1)
    with pytest.raises(ValueError, match="brings a tree of 11 tokens; the plan allows 10"):
        steps(engine, [entry(0, 1, seed=3, parents=parents)])


def after(engine, context, tokens) -> np.ndarray:
    """The last row of `tokens` behind a context that a new sequence reads as a chain."""
    handle = engine.open()
    for start in range(0, len(context), 10):
        steps(engine, [SequenceStep(handle, context[start : start + 10], needs_logits=False)])
    found = steps(engine, [SequenceStep(handle, tokens)])[0][-1]
    engine.close(handle)
    return found


@pytest.mark.parametrize("path", [(), (0,), (1,), (1, 2)])
def test_a_kept_path_is_as_its_chain(engine, path):
    """In the slot itself, in a fork of it, and in one that was taken before and must not change."""
    context, draft = random_ids(MODEL[0], 9, seed=1), Draft((7, 8, 9), FORK)
    handle = engine.open()
    steps(engine, [SequenceStep(handle, context)])
    before = engine.fork(handle)
    rows = steps(engine, [SequenceStep(handle, [5], draft)], lambda index, drafted: path)[0]
    for row, tokens in enumerate(([5], [5, 7], [5, 8], [5, 8, 9])):
        np.testing.assert_allclose(rows[row], after(engine, context, tokens), atol=2e-4)
    later = engine.fork(handle)
    kept = [5, *[draft.ids[index] for index in path]]
    assert engine.length(handle) == 9 + len(kept)
    for each, text in ((handle, [*context, *kept]), (later, [*context, *kept]), (before, context)):
        found = steps(engine, [SequenceStep(each, [6])])[0][-1]
        np.testing.assert_allclose(found, after(engine, text, [6]), atol=2e-4)
    engine.truncate(later, 9 + len(kept) - 1)
    found = steps(engine, [SequenceStep(later, [4])])[0][-1]
    np.testing.assert_allclose(found, after(engine, [*context, *kept[:-1]], [4]), atol=2e-4)


def test_what_fails_or_is_no_path_changes_nothing(engine):
    engine.open(), engine.open()
    steps(engine, [entry(0, 5, seed=1), entry(1, 2, seed=2)])
    batch = [entry(0, 1, seed=3, parents=FORK), entry(1, 1, seed=4)]
    before = steps(engine, batch, lambda index, drafted: ())
    engine.truncate(0, 5), engine.truncate(1, 2)

    def interrupted(index, logits):
        if index:
            raise KeyboardInterrupt
        return Acceptance((0,), 2, (1, 2))

    with pytest.raises(KeyboardInterrupt):
        engine.step(batch, interrupted)
    with pytest.raises(ValueError, match=r"\(0, 2\) is no path of 2 accepted tokens"):
        engine.step(batch, lambda index, logits: Acceptance((0,), 2, (0, 2)))
    assert [engine.length(0), engine.length(1)] == [5, 2]
    assert_same_logits(steps(engine, batch, lambda index, drafted: ()), before)


def test_trees_are_replayed_as_chains_are(tmp_path, reference):
    trt = double(rtx=False)
    engine = open_double(trt, tmp_path)
    for each in (engine, reference):
        each.open()
        steps(each, [entry(0, 5, seed=1)])
    for seed, parents in enumerate((None, FORK, (-1, 0, 0), None)):
        batch = [entry(0, 1, 3, seed=seed, parents=parents)]
        keep = lambda index, drafted, parents=parents: 1 if parents is None else (1,) if parents == FORK else (0, 2)  # noqa: E731
        assert_same_logits(steps(engine, batch, keep), steps(reference, batch, keep))
    assert trt.device.replayed == 3


def test_a_scored_prompt_longer_than_a_pass_may_end_in_a_tree(trt, tmp_path, reference):
    prompt = random_ids(MODEL[0], 4, seed=1) * 3  # as one pass of the engine, of two of the plan
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    expected = Runner(reference).generate([prompt], params)[0]
    engine, trees = open_double(trt, tmp_path), []
    step = engine.step

    def watched(batch, accept):
        trees.extend(entry.draft for entry in batch if entry.draft.is_tree)
        return step(batch, accept)

    engine.step = watched
    runner = Runner(engine, drafter=make_drafter("recycle"), max_batch_size=4, max_draft_len=3)
    for _ in range(2):  # at first the drafter knows no continuation of the prompt
        found = runner.generate([prompt], params)[0]
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        for one, other in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert one.keys() == other.keys()
            assert [each.logprob for each in one.values()] == pytest.approx(
                [each.logprob for each in other.values()], abs=1e-3
            )
    assert max(map(len, trees)) > 10  # rows of a pass


@pytest.mark.parametrize(("drafter", "options"), [("suffix", {"branches": 3}), ("recycle", {})])
def test_generation_drafted_with_trees_equals_plain_generation(trt, tmp_path, reference, drafter, options):
    prompts = [random_ids(MODEL[0], 6, seed=seed) * 2 for seed in range(5)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    plain = Runner(reference, max_batch_size=4, max_draft_len=3).generate(prompts, params)
    engine, trees = open_double(trt, tmp_path), []
    step = engine.step

    def watched(batch, accept):
        trees.extend(entry.draft for entry in batch if entry.draft.is_tree)
        return step(batch, accept)

    engine.step = watched
    drafted = Runner(engine, drafter=make_drafter(drafter, options), max_batch_size=4, max_draft_len=3)
    outputs = drafted.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    assert drafted.stats.num_accepted_tokens > 0 and trees
