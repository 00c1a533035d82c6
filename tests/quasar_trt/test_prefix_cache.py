"""Which finished sequences are kept, which is found, and which goes first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stubs import StubEngine, perfect_rule, random_logits

from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.errors import QuasarError
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


class SlotEngine(StubEngine):
    """Three slots of 300 bytes, taken when they are opened."""

    cache_capacity = 900
    open_bytes = 300

    @property
    def cache_bytes(self) -> int:
        return 300 * len(self.caches)

    def growth(self, sequence: int, count: int) -> int:
        return 0

    def bytes_of(self, num_tokens: int) -> int:
        return 300

    def open(self) -> int:
        assert len(self.caches) < 3, "all slots are taken"
        return super().open()


def test_kept_sequences_give_way_where_an_engine_has_slots():
    engine = SlotEngine(LOGITS, VOCAB)
    runner = Runner(engine, max_batch_size=3)
    prompts = [[number] * 90 + [tail] for number in (1, 2) for tail in (0, 3, 4)]
    for _ in range(2):
        outputs = runner.generate(prompts, GREEDY)
        assert [each.outputs[0].token_ids for each in outputs] == [perfect_rule(LOGITS)(each, 10) for each in prompts]
    assert (runner.load.kv_limit, runner.load.num_kept) == (900, 3)
    assert runner.service.num_reused_tokens > 0 and runner.service.num_preemptions == 0
    with pytest.raises(QuasarError, match="kv_cache_memory_bytes is 901; allowed: at most 900, which this engine has"):
        Runner(engine, kv_cache_memory_bytes=901)


def test_a_kept_sequence_is_taken_over_where_there_is_no_slot_beside_it():
    """One slot of three may be used: every turn of a conversation goes on in it."""
    engine = SlotEngine(LOGITS, VOCAB)
    runner = Runner(engine, kv_cache_memory_bytes=300)
    ids = [1] * 90
    for turn in range(3):
        (output,) = runner.generate([ids], GREEDY)
        assert output.outputs[0].token_ids == perfect_rule(LOGITS)(ids, 10)
        # All but the last id, which was emitted and never read, and what was added behind it.
        assert output.service.num_reused_tokens == (len(ids) - 3 if turn else 0)
        ids = [*ids, *output.outputs[0].token_ids, 2, 3]
    assert (runner.load.num_kept, runner.load.kv_bytes) == (1, 300)
    (other,) = runner.generate([[2] * 90], GREEDY)  # which shares nothing
    assert other.outputs[0].token_ids == perfect_rule(LOGITS)([2] * 90, 10) and other.service.num_reused_tokens == 0


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
