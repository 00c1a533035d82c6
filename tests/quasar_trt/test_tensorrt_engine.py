"""The engine of TensorRT plans, on a double of the runtime whose plan is the real network, interpreted."""

from __future__ import annotations

import pytest
from plan_double import TensorRTDouble
from tiny import random_ids
from tiny_plan import LIMITS, MODEL, assert_same_logits, double, entry, open_double, reference_engine, steps

from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines.base import Acceptance
from quasar_trt.engines.plan_bindings import INPUT_IDS, LOGITS_ROWS
from quasar_trt.errors import QuasarError
from quasar_trt.prefix_cache import PrefixCache
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams


@pytest.fixture(params=["tensorrt", "tensorrt_rtx"])
def trt(request) -> TensorRTDouble:
    return double(rtx=request.param == "tensorrt_rtx")


@pytest.fixture
def engine(trt, tmp_path):
    return open_double(trt, tmp_path)


@pytest.fixture
def reference():
    return reference_engine()


def test_passes_give_the_logits_of_the_reference_engine(engine, reference, trt):
    for each in (engine, reference):
        for _ in range(3):
            each.open()
    script = [
        # prompts: one longer than a chunk beside a short one, and one whose logits nobody asks for
        ([entry(0, 12, seed=1), entry(1, 4, seed=2)], [0, 0]),
        ([entry(2, 13, seed=3, needs_logits=False)], []),
        # a ragged verify pass: all, none and some of the draft is kept
        ([entry(0, 1, 3, seed=4), entry(2, 2, 1, seed=5), entry(1, 1, 2, seed=6)], [3, 0, 1]),
        # the slot between two that run does not
        ([entry(2, 1, 3, seed=7), entry(0, 1, seed=8)], [2, 0]),
        # a draft that is longer than the plan's, accepted whole: how fidelity reads logits
        ([entry(1, 1, 13, seed=9), entry(0, 1, 1, seed=10)], [13, 0]),
        ([entry(1, 1, 3, seed=11), entry(2, 1, seed=12), entry(0, 1, seed=13)], [0, 0, 0]),
    ]
    for batch, kept in script:
        keep = lambda index, drafted, kept=kept: kept[index]  # noqa: E731
        assert_same_logits(steps(engine, batch, keep), steps(reference, batch, keep))
        assert [engine.length(handle) for handle in range(3)] == [reference.length(handle) for handle in range(3)]
    # prompts go alone in chunks of 10 rows; verify passes have logits of every row, padding too
    assert [(shapes[INPUT_IDS], shapes[LOGITS_ROWS]) for shapes in trt.passes] == [
        ((1, 4), (4,)),
        *[((1, 10), (1,)), ((1, 2), (2,))],
        *[((1, 10), (1,)), ((1, 3), (3,))],
        ((3, 4), (12,)),
        ((3, 4), (12,)),
        ((1, 2), (2,)),
        *[((1, 10), (10,)), ((1, 4), (4,))],
        ((3, 4), (12,)),
    ]


def test_a_sequence_may_fill_the_cache_beside_a_longer_draft(engine, reference):
    for each in (engine, reference):
        each.open(), each.open()
    prompt = [[entry(0, 15, seed=seed)] for seed in range(3)] + [[entry(0, 2, seed=3)]]
    for batch in (*prompt, [entry(0, 1, seed=2), entry(1, 1, 3, seed=3)]):
        assert_same_logits(steps(engine, batch), steps(reference, batch))
    assert engine.length(0) == 48
    assert_same_logits(steps(engine, [entry(1, 1, 3, seed=4)]), steps(reference, [entry(1, 1, 3, seed=4)]))
    with pytest.raises(ValueError, match="would hold 49 tokens; allowed: 48"):
        steps(engine, [entry(0, 1)])


def test_rollback_leaves_nothing_behind(engine, reference):
    for each in (engine, reference):
        each.open()
        steps(each, [entry(0, 9, seed=1)])
        each.truncate(0, 4)
    assert_same_logits(steps(engine, [entry(0, 1, 2, seed=2)]), steps(reference, [entry(0, 1, 2, seed=2)]))
    assert engine.length(0) == 7
    for length in (-1, 8):
        with pytest.raises(ValueError, match="it holds 7"):
            engine.truncate(0, length)


def test_slots_are_used_again_and_handles_are_not(engine, reference):
    for each in (engine, reference):
        handles = [each.open() for _ in range(4)]
        steps(each, [entry(1, 9, seed=1)])
        each.close(1)
    with pytest.raises(ValueError, match="sequence 1 is not open"):
        engine.length(1)
    assert engine.open() == 4 and reference.open() == 4
    assert engine.length(4) == 0
    assert_same_logits(steps(engine, [entry(4, 3, seed=2)]), steps(reference, [entry(4, 3, seed=2)]))
    with pytest.raises(QuasarError, match=r"all 4 sequences that this engine holds are open.*max_batch_size"):
        engine.open()
    assert len(handles) == LIMITS.max_batch_size


def test_what_a_slot_held_before_does_no_harm(trt, tmp_path, reference):
    engine = open_double(trt, tmp_path)  # on memory full of NaN
    for each in (engine, reference):
        each.open(), each.open()
    for batch in ([entry(0, 7, seed=1), entry(1, 2, seed=2)], [entry(0, 1, seed=3), entry(1, 1, 1, seed=4)]):
        assert_same_logits(steps(engine, batch), steps(reference, batch))


def test_a_failing_accept_changes_nothing(engine):
    engine.open(), engine.open()
    steps(engine, [entry(0, 5, seed=1), entry(1, 2, seed=2)])
    before = steps(engine, [entry(0, 1, 2, seed=3)], lambda index, drafted: 0)
    engine.truncate(0, 5)

    def accept(index, logits):
        if index:
            raise KeyboardInterrupt
        return Acceptance((0,), 2)

    with pytest.raises(KeyboardInterrupt):
        engine.step([entry(0, 1, 2, seed=3), entry(1, 1, seed=4)], accept)
    with pytest.raises(ValueError, match="3 accepted tokens of 2"):
        engine.step([entry(0, 1, 2, seed=3)], lambda index, logits: Acceptance((0,), 3))
    assert [engine.length(0), engine.length(1)] == [5, 2]
    assert_same_logits(steps(engine, [entry(0, 1, 2, seed=3)]), before)


def test_drafted_generation_equals_plain_generation_of_the_reference_engine(trt, tmp_path, reference):
    prompts = [random_ids(MODEL[0], 6, seed=seed) * 2 for seed in range(5)]  # more than there are slots
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    plain = Runner(reference, max_batch_size=4, max_draft_len=3).generate(prompts, params)
    drafter = make_drafter("suffix", {"num_speculative_tokens": 3})
    drafted = Runner(open_double(trt, tmp_path), drafter=drafter, max_batch_size=4, max_draft_len=3)
    outputs = drafted.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    assert drafted.stats.num_accepted_tokens > 0


def test_every_slot_is_used_again_where_prompts_begin_alike(trt, tmp_path, reference, monkeypatch):
    monkeypatch.setattr(PrefixCache, "min_length", 4)
    shared = random_ids(MODEL[0], 20)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    runners = [Runner(each, max_batch_size=4, max_draft_len=3) for each in (open_double(trt, tmp_path), reference)]
    for turn in range(3):
        prompts = [[*shared, *random_ids(MODEL[0], 3, seed=10 * turn + i)] for i in range(4)]
        found, expected = (runner.generate(prompts, params) for runner in runners)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert runners[0].service.num_reused_tokens > 0


def test_a_budget_counts_slots(engine):
    slot_bytes = 2 * 2 * 2 * 64 * 16 * 4  # layers, keys and values, heads, capacity, head size, bytes
    runner = Runner(engine, max_batch_size=4, max_draft_len=3)
    assert (runner.load.kv_limit, runner.load.kv_bytes, runner.max_seq_len) == (4 * slot_bytes, 0, 48)
    handle = engine.open()
    assert runner.load.kv_bytes == slot_bytes
    engine.close(handle)
    assert runner.load.kv_bytes == 0
    prompts = [random_ids(MODEL[0], 5, seed=seed) for seed in range(3)]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    two = Runner(engine, max_batch_size=4, max_draft_len=3, kv_cache_memory_bytes=2 * slot_bytes)
    generations = [two.prepare(prompt, params, detokenize=False) for prompt in prompts]
    for generation in generations:
        two.submit(generation)
    two.step()
    assert (two.load.num_running, two.load.num_waiting, two.load.kv_bytes) == (2, 1, 2 * slot_bytes)
    with pytest.raises(QuasarError, match=f"at most {4 * slot_bytes}, which this engine has"):
        Runner(engine, kv_cache_memory_bytes=4 * slot_bytes + 1)
    with pytest.raises(QuasarError, match=f"at least {slot_bytes}, which a sequence of two tokens takes"):
        Runner(engine, kv_cache_memory_bytes=slot_bytes - 1)


def test_a_fork_has_a_copy_of_its_own(engine, reference):
    for each in (engine, reference):
        each.open()
        steps(each, [entry(0, 9, seed=1)])
        assert each.fork(0) == 1
        each.truncate(1, 6)
    batch = [entry(0, 1, 2, seed=2), entry(1, 2, seed=3)]
    assert_same_logits(steps(engine, batch), steps(reference, batch))
    assert (engine.length(0), engine.length(1)) == (12, 8)
    engine.close(0), reference.close(0)
    assert_same_logits(steps(engine, [entry(1, 1, seed=4)]), steps(reference, [entry(1, 1, seed=4)]))
    with pytest.raises(ValueError, match="sequence 0 is not open"):
        engine.fork(0)


def test_capabilities_are_those_of_the_plan(engine):
    assert engine.capabilities.max_rows == 16
    assert not engine.capabilities.exact and engine.capabilities.tree and engine.capabilities.fork
    with pytest.raises(ValueError, match="17 rows; this engine allows 16"):
        engine.open()
        steps(engine, [entry(0, 17)])
