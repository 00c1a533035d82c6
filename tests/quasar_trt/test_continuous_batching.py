"""Many requests over little memory: joins, chunks, preemptions, aborts and timeouts change no id and lose nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from stubs import StubDrafter, StubEngine, perfect_rule, random_logits

from quasar_trt import roster
from quasar_trt.drafters.base import Draft, Drafter
from quasar_trt.drafters.engine import EngineDrafter
from quasar_trt.errors import QuasarError
from quasar_trt.generation import Generation
from quasar_trt.prefix_cache import PrefixCache
from quasar_trt.prompt_chunks import PromptChunks
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.step_cost import StepCost

VOCAB = 6
LOGITS = functools.cache(random_logits(VOCAB, seed=3))
GREEDY = perfect_rule(LOGITS)
FLAT_THEN_STEEP = {1: 1.0, 16: 1.0, 17: 2.0}  # rows -> seconds


def open_runner(memory: int = 1 << 30, drafter: Drafter | None = None, max_rows: int = 32, **options):
    """A runner whose engine has no byte more than its budget."""
    engine = StubEngine(LOGITS, VOCAB, max_rows=max_rows, memory=memory)
    return Runner(engine, drafter=drafter, kv_cache_memory_bytes=memory, **options), engine


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def solo(prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
    return ids(open_runner()[0].generate([list(prompt)], params)[0])


def ids(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def start(runner: Runner, prompt: Sequence[int], params: SamplingParams, **options) -> Generation:
    generation = runner.prepare(list(prompt), params, **options)
    runner.submit(generation)
    return generation


def finish(runner: Runner, *generations: Generation) -> None:
    while not all(generation.finished for generation in generations):
        runner.step()


TOKENS = st.integers(0, VOCAB - 1)
PROMPTS = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=14),
    st.lists(TOKENS, max_size=5).map(lambda tail: [1, 2, 3, 4, 5, 0, 1, 2, *tail]),  # many begin alike
)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.5, 1.5]),
    top_k=st.sampled_from([0, 2]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    stop_token_ids=st.sampled_from([None, [4]]),
    logprobs=st.sampled_from([None, 1]),
    prompt_logprobs=st.sampled_from([None, 0]),
)
FIELDS = ("token_ids", "finish_reason", "stop_reason", "logprobs")


class RandomLoad(RuleBasedStateMachine):
    """Whatever comes in whatever order: every answer is that of the request alone; memory stays within its budget."""

    generations = Bundle("generations")

    def __init__(self):
        super().__init__()
        self.patch = patch.object(PrefixCache, "min_length", 4)
        self.patch.start()
        drafter = StubDrafter(
            lambda context, limit: [1, 2, *GREEDY(context, limit)][2 * (len(context) % 2) :][:limit], 4
        )
        cost = StepCost(FLAT_THEN_STEEP)
        self.runner, self.engine = open_runner(36, drafter, 12, max_batch_size=4, step_cost=cost)
        self.all: list[tuple[Generation, list[int], SamplingParams]] = []

    @rule(target=generations, prompt=PROMPTS, params=PARAMS)
    def join(self, prompt, params):
        self.all.append((start(self.runner, prompt, params, detokenize=False), prompt, params))
        return self.all[-1][0]

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.runner.step()

    @rule(generation=consumes(generations))
    def abort(self, generation):
        self.runner.abort(generation)

    @rule()
    def reset(self):
        self.runner.reset_prefix_cache()

    @invariant()
    def memory_is_within_the_budget(self):
        load = self.runner.load
        assert load.kv_bytes <= load.kv_limit == 36
        assert load.num_running <= 4

    def teardown(self):
        finish(self.runner, *(generation for generation, _, _ in self.all))
        self.patch.stop()
        for generation, prompt, params in self.all:
            (expected,) = open_runner()[0].generate([prompt], params)
            output = generation.output()
            for found, wanted in zip(output.outputs, expected.outputs, strict=True):
                if found.finish_reason == "abort":
                    assert found.token_ids == wanted.token_ids[: len(found.token_ids)]
                else:
                    assert [getattr(found, name) for name in FIELDS] == [getattr(wanted, name) for name in FIELDS]
                    assert output.prompt_logprobs == expected.prompt_logprobs
        self.runner.reset_prefix_cache()
        assert self.runner.load.kv_bytes == 0 and not self.engine.caches
        assert self.runner.service.num_finished == sum(len(each.requests) for each, _, _ in self.all)
        drafter = self.runner._scheduler._drafter
        assert len(drafter.called("start")) == len(drafter.called("stop")) == len(set(drafter.called("start")))


TestRandomLoad = RandomLoad.TestCase
TestRandomLoad.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)


def test_latest_arrival_loses_its_cache_and_comes_back():
    """Two requests of 4 + 12 ids fit, three do not: the third is preempted when the others grow."""
    prompts = [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 0]]
    runner, engine = open_runner(memory=36)
    generations = [start(runner, prompt, greedy(12)) for prompt in prompts]
    order = []
    while not all(each.finished for each in generations):
        runner.step()
        order += [each for each in generations if each.finished and each not in order]
    assert [ids(each.output()) for each in generations] == [solo(prompt, greedy(12)) for prompt in prompts]
    assert order == generations
    assert [each.output().service.num_preemptions > 0 for each in generations] == [False, False, True]
    assert runner.service.num_preemptions == generations[2].output().service.num_preemptions
    assert not engine.caches


def test_oldest_is_never_preempted_nor_overtaken():
    """New requests keep coming; the first of them each time is a large one. None starves: they end in order of arrival."""
    runner, _ = open_runner(memory=48, max_batch_size=4)
    generations = [start(runner, [1] * 20, greedy(20)), *(start(runner, [2, 3], greedy(8)) for _ in range(3))]
    ended = []
    for count in range(400):
        if count < 60:
            generations.append(start(runner, [1 + count % 5] * (1 + 11 * (count % 3)), greedy(9)))
        runner.step()
        ended += [each for each in generations if each.finished and each not in ended]
    assert len(ended) == len(generations)
    assert generations[0].output().service.num_preemptions == 0
    delays = [ended.index(each) - number for number, each in enumerate(generations)]
    assert max(delays) <= 4  # at most the others of its batch end before it


def test_prompt_that_can_never_fit_is_refused_at_once_with_both_numbers():
    runner, engine = open_runner(memory=16)
    with pytest.raises(QuasarError, match=r"16 tokens, .* take 20 bytes; allowed: 16 \(kv_cache_memory_bytes\)"):
        runner.generate([[1] * 16])
    assert not engine.passes
    (output,) = runner.generate([[1] * 12], greedy(50))
    assert len(ids(output)[0]) == 4 and output.outputs[0].finish_reason == "length"
    with pytest.raises(QuasarError, match="kv_cache_memory_bytes is 3; allowed: at least 4"):
        open_runner(memory=3)


def test_more_memory_than_the_machine_has_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr("quasar_trt.kv_budget.total_memory", lambda: 20)
    assert open_runner(memory=20)[0].load.kv_limit == 20
    with pytest.raises(
        QuasarError, match="kv_cache_memory_bytes is 21; allowed: at most 20, the memory of this machine"
    ):
        open_runner(memory=21)
    drafter = EngineDrafter(StubEngine(LOGITS, VOCAB), kv_cache_memory_bytes=21)
    with pytest.raises(
        QuasarError, match="kv_cache_memory_bytes is 21; allowed: at most 20, the memory of this machine"
    ):
        open_runner(memory=20, drafter=drafter)
    with pytest.raises(QuasarError, match="kv_cache_memory_bytes is '1G'; it must be a whole number"):
        open_runner(memory="1G")


def test_drafts_give_way_before_requests_do():
    """Both fit to their last id without drafts; the drafts behind them would not."""
    drafter = StubDrafter(GREEDY, 8)
    prompts, params = [[1, 2, 3], [2, 3, 4]], greedy(5)
    runner, _ = open_runner(memory=16, drafter=drafter)
    assert [ids(each) for each in runner.generate(prompts, params)] == [solo(prompt, params) for prompt in prompts]
    assert runner.service.num_preemptions == 0 and runner.stats.num_accepted_tokens > 0


def test_decoding_requests_have_a_row_in_every_pass_while_a_long_prompt_comes_in():
    runner, engine = open_runner(max_rows=64, step_cost=StepCost({1: 1.0, 64: 10.0}))
    first = start(runner, [1, 2], greedy(40))
    runner.step()
    late = start(runner, [3] * 60, greedy(2))
    emitted = len(first.requests[0].token_ids)
    while late.requests[0].emitted_at is None:
        runner.step()
        emitted += 1
        assert len(first.requests[0].token_ids) == emitted
    assert len(engine.passes[1].tokens[1]) == 7
    finish(runner, first, late)


def follow(chunks: PromptChunks, base_seconds: float, row_seconds: float, count: int = 200) -> list[int]:
    """Passes of 9 requests that decode; returns the rows of prompts in each."""
    rows = []
    for _ in range(count):
        rows.append(chunks.most_rows(9))
        chunks.observe(9 + rows[-1], rows[-1], base_seconds + rows[-1] * row_seconds)
    return rows


def test_prompts_double_a_pass_whatever_it_and_their_rows_come_to_cost():
    """1 row costs 1 s and each further one 1/8 s, as measured. Then 9 rows cost 8 s instead of 2 s, or rows of prompts more."""
    chunks = PromptChunks(StepCost({1: 1.0, 65: 9.0}), 65)
    assert chunks.most_rows(0) == 65
    assert [chunks.most_rows(count) for count in (1, 9, 64)] == [8, 16, 1]
    for base_seconds, row_seconds, wanted in ((2.0, 0.5, 4), (2.0, 2.0, 1), (8.0, 0.25, 32), (0.5, 0.125, 4)):
        assert abs(max(follow(chunks, base_seconds, row_seconds)[-16:]) - wanted) <= 1
    assert PromptChunks(None, 65).most_rows(3) == 62
    quick = PromptChunks(StepCost({1: 0.001, 251: 0.251}), 251)
    assert quick.most_rows(1) == 50  # in 0.05 s, although that is more than twice as long


def test_every_sixteenth_pass_tells_what_the_others_cost_without_prompts():
    rows = follow(PromptChunks(StepCost({1: 1.0, 65: 9.0}), 65), 2.0, 0.125, 64)
    assert [index for index, count in enumerate(rows) if not count] == [15, 31, 47, 63]


def test_prompts_alone_take_all_rows():
    runner, engine = open_runner(max_rows=64, step_cost=StepCost({1: 1.0, 64: 10.0}))
    runner.generate([[1] * 50, [2] * 50], greedy(1))
    assert [[len(tokens) for tokens in step.tokens] for step in engine.passes[:2]] == [[50, 14], [36]]


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_prompt_is_scored_once_however_often_it_is_computed(passes):
    """A request that scores its prompt of 30 ids in chunks of 8 loses its cache after some of them."""
    params = greedy(3, prompt_logprobs=1, logprobs=0)
    prompt = [(3 * index) % 5 for index in range(30)]
    (expected,) = open_runner()[0].generate([prompt], params)
    runner, engine = open_runner(max_rows=8)
    generation = start(runner, prompt, params)
    for _ in range(passes):
        runner.step()
    runner._scheduler._roster._preempt(generation.requests[0])
    finish(runner, generation)
    output = generation.output()
    assert ids(output) == ids(expected) and output.service.num_preemptions == 1
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert output.outputs[0].logprobs == expected.outputs[0].logprobs
    scored = [
        len(step.drafts[0]) + 1 for step in engine.passes if step.positions[0].start < 29 and step.needs_logits[0]
    ]
    assert sum(scored) == 30


@pytest.mark.parametrize("when", ["queued", "prefilling", "decoding", "finished"])
def test_abort_at_any_time(when):
    runner, engine = open_runner(max_rows=4, max_batch_size=1)
    other = start(runner, [1, 2], greedy(5)) if when == "queued" else None
    generation = start(runner, [3] * 10, greedy(6))
    steps = {"queued": 1, "prefilling": 2, "decoding": 5, "finished": 20}[when]
    for _ in range(steps):
        runner.step()
    runner.abort(generation)
    completion = generation.output().outputs[0]
    expected = solo([3] * 10, greedy(6))[0]
    assert completion.finish_reason == ("length" if when == "finished" else "abort")
    assert completion.token_ids == expected[: len(completion.token_ids)]
    assert bool(completion.token_ids) == (when in ("decoding", "finished"))
    if other:
        finish(runner, other)
        assert ids(other.output()) == solo([1, 2], greedy(5))
    assert not engine.caches and runner.load.num_waiting == 0


def test_stream_that_is_aborted_between_pieces_says_so():
    runner, _ = open_runner()
    generation = start(runner, [1, 2], greedy(9))
    runner.step()
    runner.step()
    pieces = list(generation.pieces())
    runner.abort(generation)
    pieces += generation.pieces()
    assert [piece.finish_reason for piece in pieces] == [None, "abort"] and generation.is_told
    assert pieces[0].token_ids == solo([1, 2], greedy(9))[0][:2] and pieces[1].token_ids == []


def test_request_ends_when_its_time_is_over_and_no_other_does(monkeypatch):
    times = [0.0]
    monkeypatch.setattr(roster, "perf_counter", lambda: times[-1])
    runner, engine = open_runner(max_batch_size=2)
    patient = start(runner, [1, 2], greedy(12))
    hasty = start(runner, [2, 3], greedy(12), timeout=5)
    queued = start(runner, [3, 4], greedy(12), timeout=5.5)
    for time in (1.0, 4.9, 5.0, 5.6):
        times.append(time)
        runner.step()
    assert [each.finished for each in (patient, hasty, queued)] == [False, True, True]
    for each, count in ((hasty, 2), (queued, 1)):
        completion = each.output().outputs[0]
        assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == ("timeout", None, count)
    assert hasty.output().outputs[0].token_ids == solo([2, 3], greedy(2))[0]
    finish(runner, patient)
    assert ids(patient.output()) == solo([1, 2], greedy(12))
    assert not engine.caches


def test_no_time_at_all_gives_no_tokens():
    runner, engine = open_runner()
    (output,) = runner.generate([[1, 2]], greedy(5), timeout=0)
    assert (ids(output), output.outputs[0].finish_reason) == ([[]], "timeout") and not engine.passes
    (piece,) = runner.stream([1, 2], greedy(5), timeout=0)
    assert (piece.token_ids, piece.finish_reason) == ([], "timeout")
    with pytest.raises(QuasarError, match=r"timeout is -1; allowed: seconds, 0 or more"):
        runner.generate([[1, 2]], timeout=-1)


def test_load_and_service_metrics_count_what_happened(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(roster, "perf_counter", lambda: 0.0)
    monkeypatch.setattr("quasar_trt.scheduler.perf_counter", lambda: float(next(clock)))
    runner, _ = open_runner(memory=64, max_batch_size=2)
    generations = [start(runner, [1, 2, 3], greedy(4)) for _ in range(3)]
    runner.step()
    load = runner.load
    assert (load.num_waiting, load.num_running, load.num_kept, load.kv_bytes, load.kv_limit) == (1, 2, 0, 8, 64)
    finish(runner, *generations)
    service = runner.service
    assert (service.time_to_first_token.count, service.inter_token.count, service.num_finished) == (3, 9, 3)
    assert service.time_to_first_token.total > 0
    each = generations[0].output().service
    assert (each.time_to_first_token.count, each.inter_token.count) == (1, 3)
    assert sum(one.output().service.inter_token.total for one in generations) == service.inter_token.total


class Estimating(Drafter):
    """Proposes what is right, with estimates by the first id of the context."""

    num_speculative_tokens = 4

    def __init__(self, estimates: dict[int, float]):
        self.estimates = estimates

    def propose(self, batch):
        return [
            Draft(tuple(GREEDY(each.context, each.limit)), estimates=(self.estimates[each.context[0]],) * each.limit)
            for each in batch
        ]


@pytest.mark.parametrize(("num_sure", "num_unsure"), [(1, 5), (3, 9), (8, 8)])
def test_rows_for_drafts_go_to_those_that_gain_most_and_to_none_when_there_are_no_cheap_ones(num_sure, num_unsure):
    """16 rows cost as much as 1; each further row costs as much as all of them."""
    drafter = Estimating({1: 0.9, 2: 0.3})
    runner, engine = open_runner(max_rows=256, drafter=drafter, step_cost=StepCost({1: 1.0, 16: 1.0, 17: 2.0}))
    prompts = [[1]] * num_sure + [[2]] * num_unsure
    outputs = runner.generate(prompts, greedy(12))
    assert [ids(output) for output in outputs] == [solo(prompt, greedy(12)) for prompt in prompts]
    lengths = [len(draft) for draft in engine.passes[0].drafts]
    free = 16 - num_sure - num_unsure
    sure, unsure = sum(lengths[:num_sure]), sum(lengths[num_sure:])
    assert sure == min(free, 4 * num_sure) and unsure == free - sure
