"""Drafting with another engine: output of the verifier alone, both caches rolled back, everything freed."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from stubs import StubEngine, random_logits

from quasar_trt.drafters.engine import EngineDrafter
from quasar_trt.drafters.vocabulary import SameVocabulary
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.step_cost import StepCost

VOCAB = 12
VERIFIER = random_logits(VOCAB, seed=1)
OTHER = random_logits(VOCAB, seed=2)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5]]


def near(prefix):
    """Logits that mostly decide as the verifier's do."""
    return VERIFIER(prefix) + 0.2 * OTHER(prefix)


LOGITS = {"same": VERIFIER, "near": near, "other": OTHER}


def verifier(**options) -> StubEngine:
    return StubEngine(VERIFIER, VOCAB, **options)


def drafting(name: str, **options) -> StubEngine:
    return StubEngine(LOGITS[name], VOCAB, **options)


def completions(runner: Runner, prompts, params) -> list:
    outputs = runner.generate(prompts, params)
    return [(each.token_ids, each.finish_reason) for output in outputs for each in output.outputs]


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "none"])
@pytest.mark.parametrize("name", LOGITS)
def test_greedy_ids_are_those_of_plain_decoding(name, drafter):
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = completions(Runner(verifier()), PROMPTS, params)
    for num_speculative_tokens in (1, 3, 8):
        engine = drafting(name)
        drafter_ = EngineDrafter(engine, drafter=drafter, num_speculative_tokens=num_speculative_tokens)
        runner = Runner(verifier(), drafter=drafter_)
        assert completions(runner, PROMPTS, params) == expected
        assert runner.stats.num_draft_tokens
        assert engine.caches == {}
        if name == "same":
            # Its blocks are right to the last token: every step but the last of a request emits all it can.
            assert runner.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("drafter", ["suffix", "none"])
@pytest.mark.parametrize("name", ["near", "other"])
def test_sampled_tokens_are_distributed_as_those_of_the_verifier(name, drafter):
    """Chi-square of the first two tokens over 2000 seeds against their exact probabilities: 35 degrees of freedom, of which
    one in 10000 exceeds 76."""
    verify = random_logits(6, seed=1, spread=1.0)
    other = random_logits(6, seed=2, spread=1.0)
    draft = other if name == "other" else lambda prefix: verify(prefix) + 0.3 * other(prefix)
    prompt, count = [0, 1, 0, 1, 0], 2000
    engine = StubEngine(draft, 6)
    runner = Runner(StubEngine(verify, 6), drafter=EngineDrafter(engine, drafter=drafter, num_speculative_tokens=3))
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=4) for seed in range(count)]
    outputs = runner.generate([prompt] * count, params)
    found = Counter(tuple(output.outputs[0].token_ids[:2]) for output in outputs)
    sampler = Sampler(params[0])

    def p(prefix):
        return sampler.target(verify(tuple(prefix))).dense(6).astype(float)

    first = p(prompt)
    expected = {(a, b): first[a] * p([*prompt, a])[b] for a in range(6) for b in range(6)}
    assert set(found) <= set(expected)
    assert sum((found[pair] - count * each) ** 2 / (count * each) for pair, each in expected.items()) < 76
    assert 0.1 < runner.stats.acceptance_rate < 0.98


@pytest.mark.parametrize("drafter", ["suffix", "none"])
def test_a_drafting_engine_that_is_the_verifier_is_always_right(drafter):
    """Its draws are those of its own distribution though they come through its own drafts, so every ratio is 1."""
    runner = Runner(verifier(), drafter=EngineDrafter(drafting("same"), drafter=drafter))
    runner.generate(PROMPTS, SamplingParams(temperature=0.9, seed=3, max_tokens=60))
    assert runner.stats.acceptance_rate == 1.0 and runner.stats.num_draft_tokens > 100


def test_no_noise_is_used_twice(monkeypatch):
    """What was drawn behind a rejection is no part of the output, but may decide what is drafted next: its noise does not come back."""
    used = Counter()
    uniform = Sampler.uniform

    def counted(sampler, position, stream):
        used[position, stream] += 1
        return uniform(sampler, position, stream)

    monkeypatch.setattr(Sampler, "uniform", counted)
    runner = Runner(verifier(), drafter=EngineDrafter(drafting("near"), num_speculative_tokens=5))
    runner.generate([[1, 2, 3]], SamplingParams(temperature=0.9, seed=1, max_tokens=80))
    assert 0.3 < runner.stats.acceptance_rate < 0.95
    assert set(used.values()) == {1}


def test_the_drafting_engine_needs_fewer_passes_with_a_drafter():
    period = [3, 4, 5, 6, 7]

    def logits(prefix):
        row = np.zeros(VOCAB, np.float32)
        row[period[len(prefix) % 5]] = 9.0
        return row

    params = SamplingParams(temperature=0, max_tokens=60)
    passes = {}
    for drafter in ("none", "suffix"):
        engine = StubEngine(logits, VOCAB)
        Runner(StubEngine(logits, VOCAB), drafter=EngineDrafter(engine, drafter=drafter)).generate([[1, 2]], params)
        passes[drafter] = len(engine.passes)
    assert passes["suffix"] < 0.5 * passes["none"]


def test_a_mixed_batch_equals_each_request_alone():
    prompts = [[1, 2, 3], [4, 5, 4, 5, 4], [6], [7, 8, 9, 7, 8], [1] * 9, [2, 3], [10, 11, 10], [5, 5, 6]]
    params = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=1.0, seed=1, max_tokens=25, n=2),
        SamplingParams(temperature=0.7, seed=2, top_k=3, max_tokens=18, stop_token_ids=[3]),
        SamplingParams(temperature=1.0, seed=3, top_p=0.6, max_tokens=22, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=9, presence_penalty=1.5, min_tokens=3, stop_token_ids=[2, 4, 6]),
        SamplingParams(temperature=1.3, seed=4, min_p=0.2, max_tokens=30, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0.5, seed=5, max_tokens=16, logit_bias={1: 3.0}, allowed_token_ids=[1, 2, 3, 4]),
    ]
    expected = []
    for prompt, each in zip(prompts, params, strict=True):
        alone = Runner(
            verifier(max_rows=256), drafter=EngineDrafter(drafting("near", max_rows=256), num_speculative_tokens=5)
        )
        expected += completions(alone, [prompt], [each])
        if each.greedy:
            assert completions(Runner(verifier(max_rows=256)), [prompt], [each]) == expected[-1:]
    engine = drafting("near", max_rows=256)
    runner = Runner(verifier(max_rows=256), drafter=EngineDrafter(engine, num_speculative_tokens=5))
    assert completions(runner, prompts, params) == expected
    assert engine.caches == {} and runner.stats.num_accepted_tokens
    assert max(len(step.sequences) for step in engine.passes) == 8  # in common passes; one token needs no draft


def test_what_was_rejected_leaves_the_drafting_engine_before_its_next_pass():
    engine = drafting("other")
    runner = Runner(verifier(), drafter=EngineDrafter(engine, num_speculative_tokens=4))
    generation = runner.prepare([1, 2, 3], SamplingParams(temperature=0.9, seed=1, max_tokens=40))
    context = generation.requests[0].context
    step, seen = engine.step, []

    def checked(batch, accept):
        (item,) = batch
        ids = [*engine.caches[item.sequence], *item.tokens]
        seen.append(len(ids) - len(context))
        assert ids[: len(context)] == context[: len(ids)]
        return step(batch, accept)

    engine.step = checked
    runner.submit(generation)
    while not generation.finished:
        runner.step()
    assert set(seen) >= {0, 1, 2} and runner.stats.acceptance_rate < 0.5


@pytest.mark.parametrize("end", ["abort", "timeout"])
def test_requests_that_end_early_leave_nothing_in_the_drafting_engine(end):
    engine = drafting("near")
    runner = Runner(verifier(), drafter=EngineDrafter(engine))
    timeout = 3600.0 if end == "timeout" else None
    generations = [runner.prepare(prompt, SamplingParams(max_tokens=50), timeout=timeout) for prompt in PROMPTS]
    for generation in generations:
        runner.submit(generation)
    runner.step()
    runner.step()
    assert len(engine.caches) == 3
    if end == "abort":
        for generation in generations:
            runner.abort(generation)
    else:
        for generation in generations:
            generation.requests[0].submitted_at -= 7200.0
        runner.step()
    assert engine.caches == {} and engine.cache_bytes == 0


def test_a_preempted_request_gives_up_its_sequence_and_comes_back_to_the_same_ids():
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = completions(Runner(verifier()), PROMPTS, params)
    engine = drafting("near")
    runner = Runner(verifier(), drafter=EngineDrafter(engine), kv_cache_memory_bytes=64)
    generations = [runner.prepare(prompt, params) for prompt in PROMPTS]
    for generation in generations:
        runner.submit(generation)
    while not all(generation.finished for generation in generations):
        runner.step()
        assert len(engine.caches) <= runner.load.num_running
    assert runner.service.num_preemptions
    outputs = [generation.output().outputs[0] for generation in generations]
    assert [(each.token_ids, each.finish_reason) for each in outputs] == expected


def test_the_drafting_engine_keeps_to_its_own_budget():
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = completions(Runner(verifier()), PROMPTS, params)
    engine = drafting("near", memory=64)  # more is an error
    runner = Runner(verifier(), drafter=EngineDrafter(engine, kv_cache_memory_bytes=64))
    assert completions(runner, PROMPTS, params) == expected
    assert engine.passes and engine.caches == {}


def test_ended_requests_serve_those_that_begin_alike():
    prompt = [token % VOCAB for token in range(100)]
    engine = drafting("near")
    runner = Runner(verifier(), drafter=EngineDrafter(engine))
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = runner.generate([prompt], params)
    assert len(engine.caches) == 1
    engine.passes.clear()
    runner.generate([prompt + output.outputs[0].token_ids + [3, 4]], params)
    assert sum(len(step.tokens[0]) for step in engine.passes) < 40  # not the prompt again
    runner.reset_prefix_cache()
    assert engine.caches == {} and engine.cache_bytes == 0


def test_completions_of_one_prompt_share_it():
    engine = drafting("near", max_rows=256)
    runner = Runner(verifier(max_rows=256), drafter=EngineDrafter(engine, drafter="none"))
    prompt = [token % VOCAB for token in range(100)]
    runner.generate([prompt], SamplingParams(n=3, seed=1, max_tokens=8))
    assert sum(len(tokens) for step in engine.passes for tokens in step.tokens) < 200


def test_a_long_prompt_enters_by_one_chunk_per_step():
    engine = drafting("near", max_rows=40)
    runner = Runner(verifier(), drafter=EngineDrafter(engine, num_speculative_tokens=4))
    params = SamplingParams(temperature=0, max_tokens=20)
    prompts = [[1, 2], [token % VOCAB for token in range(150)]]
    assert completions(runner, prompts, params) == completions(Runner(verifier()), prompts, params)
    rows = [sum(len(tokens) for tokens in step.tokens) + sum(map(len, step.drafts)) for step in engine.passes]
    assert max(rows) <= 40
    assert sum(any(len(tokens) > 32 for tokens in step.tokens) for step in engine.passes) >= 3


def test_a_drafting_engine_may_have_fewer_rows_than_there_are_requests():
    engine = drafting("near", max_rows=3)
    runner = Runner(verifier(), drafter=EngineDrafter(engine, num_speculative_tokens=4))
    params = SamplingParams(temperature=0, max_tokens=20)
    prompts = [*([[token] for token in range(6)]), [token % VOCAB for token in range(150)]]
    assert completions(runner, prompts, params) == completions(Runner(verifier()), prompts, params)
    assert runner.stats.num_accepted_tokens


def test_a_drafting_engine_with_a_shorter_context_drafts_as_far_as_it_goes():
    engine = drafting("same", max_seq_len=20)
    runner = Runner(verifier(), drafter=EngineDrafter(engine, drafter="none", num_speculative_tokens=4))
    params = SamplingParams(temperature=0, max_tokens=40)
    assert completions(runner, [[1, 2, 3]], params) == completions(Runner(verifier()), [[1, 2, 3]], params)
    assert max(step.positions[0].stop for step in engine.passes) == 20


def test_a_row_without_a_maximum_ends_the_block_alone():
    def broken(prefix):
        return np.full(VOCAB, np.nan, np.float32) if len(prefix) % 5 == 0 else VERIFIER(prefix)

    runner = Runner(verifier(), drafter=EngineDrafter(StubEngine(broken, VOCAB)))
    params = SamplingParams(temperature=0, max_tokens=40)
    assert completions(runner, PROMPTS, params) == completions(Runner(verifier()), PROMPTS, params)


def test_nothing_is_written_behind_the_end_of_a_request():
    params = SamplingParams(temperature=0, max_tokens=40)
    ((ids, _),) = completions(Runner(verifier()), [[1, 2, 3]], params)
    end = ids[5]
    engine = drafting("same")
    runner = Runner(verifier(), drafter=EngineDrafter(engine, drafter="none"), eos_token_ids=[end])
    assert completions(runner, [[1, 2, 3]], params) == [(ids[: ids.index(end) + 1], "stop")]
    assert len(engine.passes) == ids.index(end) + 1


def test_a_pass_that_was_interrupted_is_made_again():
    engine = drafting("near")
    runner = Runner(verifier(), drafter=EngineDrafter(engine))
    params = SamplingParams(temperature=0, max_tokens=30)
    generation = runner.prepare([1, 2, 3], params)
    runner.submit(generation)
    runner.step()
    step = engine.step

    def interrupted(batch, accept):
        step(batch, accept)  # its rows stay in the cache
        raise KeyboardInterrupt

    engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        runner.step()
    engine.step = step
    while not generation.finished:
        runner.step()
    expected = completions(Runner(verifier()), [[1, 2, 3]], params)
    assert [(each.token_ids, each.finish_reason) for each in generation.output().outputs] == expected


@pytest.mark.parametrize("vocab", [VOCAB + 5, VOCAB - 2])
def test_a_drafting_engine_may_have_more_or_fewer_ids(vocab, monkeypatch):
    """Ids that the verifier lacks are never drafted, though the drafting engine prefers them; where it lacks some itself,
    another stands in."""

    def logits(prefix):
        row = np.full(vocab, 50.0, np.float32)
        count = min(vocab, VOCAB)
        row[:count] = VERIFIER(prefix)[:count]
        return row

    monkeypatch.setattr("quasar_trt.drafters.engine.check_same_vocabulary", lambda *_: None)
    engine = StubEngine(logits, vocab)
    runner = Runner(verifier(), drafter=EngineDrafter(engine, num_speculative_tokens=4))
    params = SamplingParams(temperature=0, max_tokens=40)
    prompts = [*PROMPTS, [11, 10, 11]]
    assert completions(runner, prompts, params) == completions(Runner(verifier()), prompts, params)
    assert runner.stats.num_accepted_tokens
    assert all(token < vocab for step in engine.passes for tokens in step.tokens for token in tokens)


def test_a_row_is_cut_or_filled_up_to_the_verifiers_vocabulary():
    row = np.arange(4, dtype=np.float32)
    assert SameVocabulary(3, 4).row(row).tolist() == [0, 1, 2]
    assert SameVocabulary(6, 4).row(row).tolist() == [0, 1, 2, 3, -np.inf, -np.inf]
    assert SameVocabulary(6, 4).ids([3, 4, 5, 1]) == [3, 0, 0, 1]


def test_other_numbers_of_ids_need_tokenizers():
    with pytest.raises(QuasarError, match="the verifier has 12 token ids, the drafting engine 14"):
        Runner(verifier(), drafter=EngineDrafter(StubEngine(OTHER, 14)))


def test_an_engine_that_samples_by_itself_cannot_draft():
    engine = drafting("same")
    engine.capabilities = dataclasses.replace(engine.capabilities, accepts_inside=True)
    with pytest.raises(QuasarError, match="drafting engine StubEngine samples by itself"):
        Runner(verifier(), drafter=EngineDrafter(engine))


def test_a_request_that_is_not_to_be_drafted_is_left_alone():
    engine = drafting("near")
    runner = Runner(verifier(), drafter=EngineDrafter(engine), kv_cache_memory_bytes=64)
    generations = [runner.prepare(prompt, SamplingParams(temperature=0), drafts=False) for prompt in PROMPTS]
    for generation in generations:
        runner.submit(generation)
    while not all(generation.finished for generation in generations):
        runner.step()
    assert engine.passes == [] and runner.stats.num_draft_tokens == 0


def test_blocks_are_made_only_while_they_pay(monkeypatch):
    """A drafting engine that agrees is used; one that does not, or is no faster than the verifier, is tried at times."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    verify = {1: 1.0, 9: 1.2, 17: 1.4}
    passes, ids = {}, set()
    monkeypatch.setattr(StepCost, "observe", lambda *_: None)
    for name, factor in (("same", 0.3), ("other", 0.3), ("same", 1.5)):
        engine = drafting(name)
        cost = {rows: factor * seconds for rows, seconds in verify.items()}
        monkeypatch.setattr("quasar_trt.drafters.engine.measure", lambda *_, cost=cost: (cost, True))
        monkeypatch.setattr("quasar_trt.drafters.engine.compare", lambda *_, factor=factor: factor)
        runner = Runner(verifier(), drafter=EngineDrafter(engine, drafter="none"), step_cost=StepCost(verify))
        ids.add(str(completions(runner, [[1, 2, 3]], params)))
        passes[name, factor] = len(engine.passes)
    assert len(ids) == 1
    assert passes["same", 0.3] > 150
    assert passes["other", 0.3] < 40 and passes["same", 1.5] < 10
