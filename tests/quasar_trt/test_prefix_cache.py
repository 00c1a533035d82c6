"""Which finished sequences are kept, which is found, and which goes first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stubs import StubEngine, perfect_rule, random_logits

from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.prefix_cache import PrefixCache, common_prefix
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VOCAB = 6
LOGITS = random_logits(VOCAB, seed=3)
GREEDY = SamplingParams(temperature=0, max_tokens=10)


@given(st.lists(st.integers(0, 1), max_size=80), st.lists(st.integers(0, 1), max_size=80), st.integers(0, 200))
def test_common_prefix_is_that_of_the_lists(a, b, shared):
    begin = [index % 3 for index in range(shared)]
    a, b = begin + a, begin + b
    differences = [index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    assert common_prefix(a, b) == min([*differences, len(a), len(b)])


@pytest.fixture
def engine() -> StubEngine:
    return StubEngine(LOGITS, VOCAB, max_rows=300, max_seq_len=300)


def sequence(engine: StubEngine, ids: list[int]) -> int:
    opened = engine.open()
    engine.step([SequenceStep(opened, ids)], lambda *_: Acceptance((0,), 0))
    return opened


def test_longest_prefix_is_found_and_the_one_used_longest_ago_goes_first(engine):
    cache = PrefixCache(engine, 2)
    first, second, third = ([number] * 100 for number in (1, 2, 3))
    one, two = sequence(engine, first), sequence(engine, second)
    cache.keep(one, first)
    cache.keep(two, second)
    assert cache.find([1] * 64 + [0]) == (one, 64) and cache.find([1] * 63 + [0]) == (None, 0)
    assert cache.find([4] * 100) == (None, 0)
    three = sequence(engine, third)
    cache.keep(three, third)
    assert engine.closed == [two] and cache.find(first) == (one, 100)
    assert [cache.drop(), cache.drop(), cache.drop()] == [True, True, False]
    assert engine.closed == [two, three, one]


def test_what_is_short_or_begins_another_is_not_kept(engine):
    cache = PrefixCache(engine, 8)
    for length, closed in ((63, 1), (80, 1), (100, 2), (100, 3), (90, 4)):
        ids = [1] * length
        cache.keep(sequence(engine, ids), [*ids, 5])  # the last id was emitted and is not cached
        assert len(engine.closed) == closed
    assert len(cache) == 1 and cache.find([1] * 200)[1] == 100


def test_kept_sequences_give_way_to_active_ones():
    """Memory for 160 ids: what is kept of one request goes when another one needs its place, and no request waits for it."""
    prompts = [[number] * 90 for number in (1, 2, 3)]
    engine = StubEngine(LOGITS, VOCAB, memory=160)
    runner = Runner(engine, kv_cache_memory_bytes=160)
    expected = [perfect_rule(LOGITS)(prompt, 10) for prompt in prompts]
    for prompt, wanted in itertools.chain(*itertools.repeat(list(zip(prompts, expected, strict=True)), 2)):
        (output,) = runner.generate([prompt], GREEDY)
        assert output.outputs[0].token_ids == wanted
        assert (runner.load.num_kept, runner.load.num_waiting) == (1, 0)
        (again,) = runner.generate([prompt], GREEDY)
        assert again.outputs[0].token_ids == wanted and again.service.num_reused_tokens == 89
    assert runner.service.num_preemptions == 0


def test_nothing_is_kept_of_a_request_that_failed_or_without_fork():
    def failing(emitted, row):
        raise ValueError("failed")

    engine = StubEngine(LOGITS, VOCAB)
    runner = Runner(engine)
    runner.generate([[1] * 100], SamplingParams(max_tokens=2, logits_processors=[failing]))
    assert runner.load.num_kept == 0 and not engine.caches
    runner.generate([[1] * 100], GREEDY)
    assert runner.load.num_kept == 1
    runner.reset_prefix_cache()
    assert runner.load.num_kept == 0 and not engine.caches
