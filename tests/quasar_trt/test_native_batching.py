"""Many requests on the native engine: equal to their solo runs bit for bit, within their memory, and nothing is left behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny import random_ids, tiny_checkpoint

from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.drafters.base import Draft
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.recipe import Recipe
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.step_cost import StepCost

PAGE = 64  # tokens


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "rank0.engine"
    compile_cpu(*tiny_checkpoint(3, Recipe("int8")), path)
    return path


def open_runner(packed: Path, num_pages: int | None = None, drafter: str | None = None, **options) -> Runner:
    engine = CpuEngine(packed, max_seq_len=1024, threads=1)
    memory = None if num_pages is None else num_pages * engine.bytes_of(1)
    made = make_drafter(drafter, {})
    return Runner(engine, drafter=made, kv_cache_memory_bytes=memory, **options)


def random_request(draw: random.Random, config, longest: int) -> tuple[list[int], SamplingParams]:
    shared = random_ids(config, 80, seed=draw.randrange(3)) if draw.random() < 0.4 else []
    prompt = shared + random_ids(config, draw.randrange(1, 60), seed=draw.randrange(1000))
    temperature = draw.choice([0.0, 0.7, 1.2])
    return prompt, SamplingParams(
        n=1 if temperature == 0 else draw.choice([1, 1, 2]),
        temperature=temperature,
        seed=draw.randrange(100),
        max_tokens=draw.randrange(1, longest),
        top_k=draw.choice([0, 5]),
        repetition_penalty=draw.choice([1.0, 1.2]),
        prompt_logprobs=draw.choice([None, None, None, 0]),
    )


def ids(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("seed", [0, 1])
def test_ids_alone_equal_ids_among_sixteen_with_joins_aborts_and_preemptions(packed, seed):
    draw = random.Random(seed)
    cost = StepCost({1: 1.0, 8: 1.5, 64: 9.0})
    runner = open_runner(packed, num_pages=9, drafter="suffix", max_batch_size=16, step_cost=cost)
    requests = [random_request(draw, runner.engine.config, 120) for _ in range(48)]
    waiting = [(runner.prepare(prompt, params), draw.random() < 0.1) for prompt, params in requests]
    started = []
    while len(started) < len(waiting) or not all(generation.finished for generation, _ in started):
        while len(started) < len(waiting) and draw.random() < 0.4:
            started.append(waiting[len(started)])
            runner.submit(started[-1][0])
        runner.step()
        assert runner.engine.cache_bytes <= runner.load.kv_limit
        for generation, aborted in started:
            if aborted and draw.random() < 0.1:
                runner.abort(generation)
    assert runner.service.num_preemptions > 0 and runner.service.num_reused_tokens > 0
    assert runner.stats.num_accepted_tokens > 0
    plain = open_runner(packed)
    for (prompt, params), (generation, _) in zip(requests, started, strict=True):
        plain.reset_prefix_cache()
        (expected,) = plain.generate([prompt], params)
        output = generation.output()
        for found, wanted in zip(output.outputs, expected.outputs, strict=True):
            if found.finish_reason == "abort":
                assert found.token_ids == wanted.token_ids[: len(found.token_ids)]
            else:
                assert found.token_ids == wanted.token_ids and output.prompt_logprobs == expected.prompt_logprobs


def test_thousand_random_requests_leave_nothing_behind(packed):
    draw = random.Random(5)
    runner = open_runner(packed, num_pages=12, drafter="suffix", max_batch_size=16)
    generations = []
    for number in range(1000):
        generations.append(runner.prepare(*random_request(draw, runner.engine.config, 30)))
        runner.submit(generations[-1])
        if number % 8 == 7:
            runner.step()
            assert runner.engine.cache_bytes <= runner.load.kv_limit
        if draw.random() < 0.1:
            runner.abort(draw.choice(generations[-20:]))
    while not all(generation.finished for generation in generations):
        runner.step()
    completions = [request for generation in generations for request in generation.requests]
    assert runner.service.num_finished == len(completions)
    reasons = [request.finish_reason for request in completions]
    assert set(reasons) == {"length", "abort"} and 50 < reasons.count("abort") < 200
    lengths = [len(each.token_ids) == each.params.max_tokens for each in completions if each.finish_reason == "length"]
    assert all(lengths)
    load = runner.load
    assert (load.num_waiting, load.num_running) == (0, 0) and load.num_kept <= 16
    runner.reset_prefix_cache()
    assert runner.load.kv_bytes == 0


@pytest.mark.parametrize("budget", [None, 24])
def test_common_prefix_is_computed_once(packed, budget):
    runner = open_runner(packed, num_pages=budget)
    system = random_ids(runner.engine.config, 512)
    prompts = [system + random_ids(runner.engine.config, 20, seed=seed + 1) for seed in range(8)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=16)
    outputs = runner.generate(prompts, params)
    assert [output.service.num_reused_tokens >= 512 for output in outputs] == [False] + [True] * 7
    plain = open_runner(packed)
    for prompt, output in zip(prompts, outputs, strict=True):
        plain.reset_prefix_cache()
        assert ids(output) == ids(plain.generate([prompt], params)[0])


def test_next_turn_computes_only_what_is_new(packed):
    runner = open_runner(packed)
    prompt = random_ids(runner.engine.config, 100)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30)
    (first,) = runner.generate([prompt], params)
    turn = [*prompt, *ids(first)[0], 7, 8, 9]
    (second,) = runner.generate([turn], params)
    assert second.service.num_reused_tokens == 129  # the last emitted token was never in a cache
    plain = open_runner(packed)
    assert ids(second) == ids(plain.generate([turn], params)[0])
    (scored,) = runner.generate([turn], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert scored.service.num_reused_tokens == 0 and len(scored.prompt_logprobs) == len(turn)
    assert runner.load.num_kept == 1  # what begins another kept sequence is not kept twice


def _reference(packed: Path) -> Engine:
    return ReferenceEngine(ReferenceModel(*tiny_checkpoint(3, Recipe("int8"))), max_seq_len=1024)


@pytest.mark.parametrize("opened", [lambda path: CpuEngine(path, max_seq_len=1024, threads=1), _reference])
def test_growth_says_beforehand_what_a_pass_takes(packed, opened):
    """Random passes over forks of forks: the cache never grows by more than was said, and shrinks to nothing."""
    engine, draw = opened(packed), random.Random(1)
    sequences = [engine.open()]
    assert engine.cache_bytes == 0
    for _ in range(60):
        sequence = draw.choice(sequences)
        action = draw.choice(["step", "step", "fork", "truncate", "close"])
        if action == "step":
            tokens, drafted = random_ids(engine.config, draw.randrange(1, 40)), draw.randrange(3)
            growth, before = engine.growth(sequence, len(tokens) + drafted), engine.cache_bytes
            engine.step(
                [SequenceStep(sequence, tokens, Draft((1,) * drafted))], lambda *_, kept=drafted: Acceptance((1,), kept)
            )
            assert engine.cache_bytes - before <= growth
        elif action == "fork":
            before = engine.cache_bytes
            sequences.append(engine.fork(sequence))
            assert engine.cache_bytes == before
        elif action == "truncate":
            engine.truncate(sequence, draw.randrange(engine.length(sequence) + 1))
        elif len(sequences) > 1:
            sequences.remove(sequence)
            engine.close(sequence)
    for sequence in sequences:
        engine.close(sequence)
    assert engine.cache_bytes == 0


def test_a_sequence_takes_what_was_said(packed):
    for engine in (CpuEngine(packed, max_seq_len=1024, threads=1), _reference(packed)):
        sequence = engine.open()
        for more in (1, 63, 1, 100):
            said = engine.growth(sequence, more)
            engine.step([SequenceStep(sequence, [1] * more)], lambda *_: Acceptance((1,), 0))
            assert engine.cache_bytes == engine.bytes_of(engine.length(sequence))
            assert said == engine.cache_bytes - engine.bytes_of(engine.length(sequence) - more)
