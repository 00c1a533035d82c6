"""Whole generations through TensorRT-LLM's executor, on a double of it: what is asked of it, and that drafting changes nothing."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from llm_engines import llm_engine
from stubs import ByteTokenizer, StubDrafter, StubEngine, chain_logits, perfect_rule, random_logits
from tiny import random_ids, tiny_checkpoint

from quasar_trt.bench.cell import verify_costs
from quasar_trt.bench.kernels import engine_curves
from quasar_trt.drafters.base import Draft
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines.base import SequenceStep
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Limits
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.step_cost import measure

VOCAB = 6
LOGITS = random_logits(VOCAB, seed=3)  # few ids, so that drafts are accepted and rejected alike
PROMPT = [1, 2, 3, 1, 2]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture
def open_engine(tmp_path):
    def opened(logits=LOGITS, vocab=VOCAB, **limits):
        values = {"max_batch_size": 16, "max_seq_len": 256, "max_draft_len": 8} | limits
        return llm_engine(tmp_path / "engine", logits, vocab, Limits(**values))

    return opened


def ngram(num_speculative_tokens: int = 5):
    return make_drafter("ngram", {"num_speculative_tokens": num_speculative_tokens})


def generate(engine, prompts, params, drafter=None, **options):
    outputs = Runner(engine, drafter=drafter, **options).generate(prompts, params)
    return [output.outputs[0].token_ids for output in outputs]


def idle(engine) -> bool:
    """Whether neither the engine nor its executor is left with anything."""
    executor = engine._executor
    return not (engine._sequences or engine._flights or executor._running or executor._waiting)


# --- what the executor is asked for


def test_plain_request_is_one_request_of_the_executor(open_engine):
    engine = open_engine()
    (ids,) = generate(engine, PROMPT, GREEDY)
    assert ids == generate(StubEngine(LOGITS, VOCAB), PROMPT, GREEDY)[0]
    (request,) = engine._executor.requests
    assert (request.max_tokens, request.streaming, request.external_draft_tokens_config) == (40, True, None)
    assert idle(engine)


def test_each_draft_is_one_request_and_the_next_brings_what_was_accepted(open_engine):
    engine = open_engine()
    runner = Runner(engine, drafter=StubDrafter(perfect_rule(LOGITS), 3))
    (output,) = runner.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))
    context = PROMPT + output.outputs[0].token_ids
    requests = engine._executor.requests
    assert [len(request.input_token_ids) for request in requests] == [5, 9]
    for request in requests:
        start = len(request.input_token_ids)
        drafts = request.external_draft_tokens_config.tokens
        assert request.input_token_ids == context[:start] and drafts == context[start : start + len(drafts)]
        assert request.max_tokens == len(drafts) + 1 and not request.streaming
    assert engine._executor.passes == [[(5, 3)], [(1, 3)]]  # 8 of the 9 ids are in whole blocks that were kept
    assert (runner.stats.num_accepted_tokens, runner.stats.num_emitted_tokens) == (6, 8)


@pytest.mark.parametrize("num_speculative_tokens", range(1, 9))
def test_drafted_ids_equal_plain_ids(open_engine, num_speculative_tokens):
    engine = open_engine()
    runner = Runner(engine, drafter=ngram(num_speculative_tokens))
    (output,) = runner.generate(PROMPT, GREEDY)
    assert [output.outputs[0].token_ids] == generate(StubEngine(LOGITS, VOCAB), PROMPT, GREEDY)
    assert 0 < runner.stats.num_accepted_tokens < runner.stats.num_draft_tokens
    assert idle(engine)


def test_ids_of_a_model_equal_those_of_the_reference_engine(tmp_path):
    model = ReferenceModel(*tiny_checkpoint(num_hidden_layers=2))
    prompts = [random_ids(model.config, count, seed=count) for count in (3, 9, 20)]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = generate(ReferenceEngine(model, max_seq_len=64), prompts, params)
    for drafter in (None, make_drafter("suffix", {})):
        engine = llm_engine(tmp_path / "engine", model, model.config.vocab_size, Limits(4, 64, 8))
        assert generate(engine, prompts, params, drafter, max_draft_len=8) == expected
        assert idle(engine)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_perfect_and_useless_drafters_are_counted_as_such(open_engine, rate):
    params = SamplingParams(temperature=0, max_tokens=20)
    (plain,) = generate(open_engine(), PROMPT, params)
    off = 0 if rate else 1
    drafter = StubDrafter(
        lambda context, limit: [(t + off) % VOCAB for t in plain[len(context) - len(PROMPT) :][:limit]]
    )
    runner = Runner(open_engine(), drafter=drafter)
    assert runner.generate(PROMPT, params)[0].outputs[0].token_ids == plain
    assert runner.stats.acceptance_rate == rate


def test_greedy_drafts_with_probabilities_give_the_same_ids(open_engine):
    drafter = StubDrafter(lambda context, limit: ([2] * limit, np.full((limit, VOCAB), 1 / VOCAB, np.float32)))
    assert generate(open_engine(), PROMPT, GREEDY, drafter) == generate(open_engine(), PROMPT, GREEDY)


def test_ties_go_to_the_lowest_id_with_and_without_a_draft(open_engine):
    engine = open_engine(lambda prefix: np.float32([0, 0, 1, 0, 0, 1]))
    params = SamplingParams(temperature=0, max_tokens=3)
    for drafter in (None, StubDrafter(lambda context, limit: [5][:limit])):
        assert generate(engine, [1], params, drafter) == [[2, 2, 2]]


# --- many requests


def test_ragged_batch_equals_solo_runs(open_engine):
    """Prompts of 1, 5 and 9 ids whose drafts are right up to 0, 2 and 5 tokens."""
    prompts = [[4], [1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0, 1, 2, 3]]
    params = SamplingParams(temperature=0, max_tokens=24)
    solo = [generate(open_engine(), prompt, params)[0] for prompt in prompts]
    of = {prompt[0]: (prompt, ids, count) for prompt, ids, count in zip(prompts, solo, (0, 2, 5), strict=True)}

    def rule(context, limit):
        prompt, ids, right = of[context[0]]
        draft = ids[len(context) - len(prompt) :][:limit]
        return [token if i < right else (token + 1) % VOCAB for i, token in enumerate(draft)]

    engine = open_engine()
    assert generate(engine, prompts, params, StubDrafter(rule, num_speculative_tokens=6)) == solo
    assert idle(engine)


@pytest.mark.parametrize("drafted", [False, True])
def test_waiting_requests_join_as_others_finish(open_engine, drafted):
    prompts = [[i % VOCAB, i // VOCAB] for i in range(7)]
    params = SamplingParams(temperature=0, max_tokens=5)
    engine = open_engine()
    ids = generate(engine, prompts, params, ngram() if drafted else None, max_batch_size=3)
    assert ids == generate(StubEngine(LOGITS, VOCAB), prompts, params)
    assert max(map(len, engine._executor.passes)) == 3 and idle(engine)


def test_seeded_request_does_not_depend_on_neighbours_or_history(open_engine):
    a = SamplingParams(seed=7, max_tokens=12)
    (alone,) = generate(open_engine(), PROMPT, a)
    runner = Runner(open_engine())
    for seed in (9, None):
        next(runner.stream([3, 1], SamplingParams(seed=seed, max_tokens=30)))
    with_neighbours = runner.generate(PROMPT, a)[0].outputs[0].token_ids
    runner.generate([[2]] * 5, SamplingParams(max_tokens=2))
    assert with_neighbours == alone == runner.generate(PROMPT, a)[0].outputs[0].token_ids
    assert generate(open_engine(), PROMPT, SamplingParams(seed=8, max_tokens=12)) != [alone]


def test_completions_of_a_prompt_and_resubmissions_have_seeds_of_their_own(open_engine):
    engine = open_engine()
    generate(engine, PROMPT, SamplingParams(seed=0, n=2, max_tokens=12), StubDrafter(perfect_rule(LOGITS), 2))
    keys = {
        (tuple(r.input_token_ids[:5]), len(r.input_token_ids), r.sampling_config.seed)
        for r in engine._executor.requests
    }
    assert len({seed for _, _, seed in keys}) == len(engine._executor.requests) > 4
    again = open_engine()
    generate(again, PROMPT, SamplingParams(seed=0, n=2, max_tokens=12), StubDrafter(perfect_rule(LOGITS), 2))
    seeds = [[r.sampling_config.seed for r in each._executor.requests] for each in (engine, again)]
    assert seeds[0] == seeds[1]


# --- finishing


def finish(engine, params, eos=(), drafter=None, prompt=(0,)):
    runner = Runner(engine, eos_token_ids=eos, tokenizer=ByteTokenizer(), drafter=drafter)
    (output,) = runner.generate([list(prompt)], params)
    completion = output.outputs[0]
    assert idle(engine)
    return completion.token_ids, completion.finish_reason, completion.stop_reason


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ([4, 5, 2], "stop", None)),
        ({"ignore_eos": True, "max_tokens": 5}, ([4, 5, 2, 3, 3], "length", None)),
        ({"stop_token_ids": [5]}, ([4, 5], "stop", 5)),
        ({"max_tokens": 2}, ([4, 5], "length", None)),
        ({"max_tokens": 3}, ([4, 5, 2], "stop", None)),
        ({"logprobs": 0}, ([4, 5, 2], "stop", None)),
    ],
)
def test_request_ends_as_on_other_engines(open_engine, drafted, options, expected):
    chain = [4, 5, 2, 3, 3, 3, 3]
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6} | options)
    drafter = StubDrafter(lambda context, limit: chain[len(context) - 1 :][:limit], 4) if drafted else None
    assert finish(open_engine(chain_logits(chain, 1, VOCAB)), params, [2, 1], drafter) == expected


def test_second_end_of_sequence_id_ends_too(open_engine):
    engine = open_engine(chain_logits([4, 1, 3, 3, 3], 1, VOCAB))
    assert finish(engine, GREEDY, [2, 1]) == ([4, 1], "stop", 1)


def test_end_of_sequence_inside_an_accepted_draft(open_engine):
    engine = open_engine(chain_logits([4, 5, 2, 3, 3], 1, VOCAB))
    drafter = StubDrafter(lambda context, limit: [4, 5, 2, 3][:limit])
    runner = Runner(engine, drafter=drafter, eos_token_ids=[2])
    (output,) = runner.generate([[1]], SamplingParams(temperature=0, max_tokens=50))
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([4, 5, 2], "stop")
    assert (runner.stats.num_emitted_tokens, runner.stats.num_accepted_tokens) == (3, 3)
    assert drafter.calls == [("start", 0, (1,)), ("stop", 0)]


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("eos", [[], [2], [2, 5]])
@pytest.mark.parametrize("min_tokens", [1, 3, 7])
def test_nothing_ends_a_request_before_min_tokens(open_engine, drafted, eos, min_tokens):
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=min_tokens, stop_token_ids=[1])
    drafter = ngram() if drafted else None
    expected = Runner(StubEngine(LOGITS, VOCAB), eos_token_ids=eos).generate([PROMPT], params)[0].outputs[0]
    found = finish(open_engine(), params, eos, drafter, PROMPT)
    assert found == (expected.token_ids, expected.finish_reason, expected.stop_reason)
    assert len(found[0]) >= min_tokens


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("drafted", [False, True])
def test_exactly_max_tokens(open_engine, max_tokens, drafted):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    drafter = StubDrafter(perfect_rule(LOGITS), num_speculative_tokens=5) if drafted else None
    (output,) = Runner(open_engine(), drafter=drafter).generate(PROMPT, params)
    assert output.outputs[0].token_ids == perfect_rule(LOGITS)(PROMPT, max_tokens)
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.num_emitted_tokens == max_tokens
    assert output.metrics.num_verify_steps == (-(-max_tokens // 6) if drafted else max_tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("drafted", [False, True])
def test_context_limit(open_engine, drafted, top_p, temperature):
    prompt = [i % VOCAB for i in range(13)]
    drafter = StubDrafter(perfect_rule(LOGITS), num_speculative_tokens=5) if drafted else None
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=50)
    (output,) = Runner(open_engine(max_seq_len=16), drafter=drafter).generate(prompt, params)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (3, "length")


@pytest.mark.parametrize("per_step", [1, 3, 13])
def test_ids_logprobs_and_text_end_with_the_stop_text(open_engine, per_step):
    chain = list(b"xxENDyyyyyyyy")
    drafter = StubDrafter(lambda context, limit: chain[len(context) - 1 :][:limit], per_step - 1)
    engine = open_engine(chain_logits(chain, 1, 257), 257, max_draft_len=12)
    runner = Runner(engine, tokenizer=ByteTokenizer(), drafter=drafter if per_step > 1 else None)
    params = SamplingParams(temperature=0, max_tokens=13, stop="END", logprobs=0)
    completion = runner.generate([1], params)[0].outputs[0]
    assert (completion.text, completion.stop_reason, bytes(completion.token_ids)) == ("xx", "END", b"xxEND")
    assert [list(entry) for entry in completion.logprobs] == [[token] for token in b"xxEND"]
    assert "".join(piece.text for piece in runner.stream([1], params)) == "xx"
    assert idle(engine)


# --- leaving early


def test_stream_closed_early_cancels_its_request(open_engine):
    engine = open_engine()
    stream = Runner(engine).stream(PROMPT, GREEDY)
    next(stream)
    stream.close()
    assert idle(engine)
    assert len(engine._executor.passes) < 5
    assert generate(engine, PROMPT, GREEDY) == generate(StubEngine(LOGITS, VOCAB), PROMPT, GREEDY)


@pytest.mark.parametrize("drafted", [False, True])
def test_abort_keeps_what_there_is(open_engine, drafted):
    engine = open_engine()
    runner = Runner(engine, drafter=ngram() if drafted else None)
    generation = runner.prepare(PROMPT, GREEDY)
    runner.submit(generation)
    for _ in range(3):
        runner.step()
    runner.abort(generation)
    completion = generation.output().outputs[0]
    assert completion.finish_reason == "abort" and completion.token_ids
    assert completion.token_ids == generate(open_engine(), PROMPT, GREEDY)[0][: len(completion.token_ids)]
    assert idle(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", ["wait", "after"])
def test_stream_goes_on_with_its_own_ids_after_an_interrupted_pass(open_engine, monkeypatch, place, temperature):
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=25)
    (plain,) = generate(open_engine(), PROMPT, params)
    engine = open_engine()
    runner = Runner(engine)
    stream = runner.stream(PROMPT, params)
    found = list(next(stream).token_ids)
    target, name = (engine, "_receive") if place == "wait" else (runner._scheduler, "_commit")
    original = getattr(target, name)

    def interrupted(*arguments):
        monkeypatch.setattr(target, name, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(target, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.generate([[4, 4, 4]], params)
    found += [token for output in stream for token in output.token_ids]
    assert found == plain and idle(engine)


def test_request_that_the_executor_refuses_ends_alone(open_engine, monkeypatch):
    engine = open_engine()
    start = engine._executor._start

    def failing(request_id, request):
        if request.input_token_ids[0] == 5:
            raise RuntimeError("[TensorRT-LLM][ERROR] out of\nblocks")
        return start(request_id, request)

    monkeypatch.setattr(engine._executor, "_start", failing)
    outputs = Runner(engine, drafter=ngram()).generate([[1, 2], [5, 1], [2, 2]], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "out of blocks" in outputs[1].outputs[0].stop_reason
    assert [outputs[0].outputs[0].token_ids] == generate(StubEngine(LOGITS, VOCAB), [1, 2], GREEDY)
    assert idle(engine)


# --- as an engine


def test_rolled_back_sequence_goes_on_as_a_fresh_one(open_engine):
    engine = open_engine()
    sequence = engine.open()
    greedy = perfect_rule(LOGITS)

    def step(tokens, draft=()):
        (acceptance,) = engine.step([SequenceStep(sequence, tokens, Draft(tuple(draft)))], None)
        return list(acceptance.emitted)

    (first,) = step(PROMPT)
    (second,) = step([first])
    assert [first, second] == greedy(PROMPT, 2)
    engine.truncate(sequence, len(PROMPT))
    assert engine.length(sequence) == len(PROMPT)
    assert step([first]) == [second]  # still generated
    engine.truncate(sequence, 3)
    assert step([4, 5]) == greedy([1, 2, 3, 4, 5], 1)  # something else comes after the prefix
    wrong = [(token + 1) % VOCAB for token in greedy([1, 2, 3, 4, 5, 0], 2)]
    assert step([0], wrong) == greedy([1, 2, 3, 4, 5, 0], 1)
    assert engine.length(sequence) == 6
    engine.close(sequence)
    assert idle(engine)
    with pytest.raises(ValueError, match="not open"):
        engine.length(sequence)


def test_drafts_beyond_the_engines_length_are_no_pass(open_engine):
    engine = open_engine(max_draft_len=3)
    with pytest.raises(ValueError, match="4 draft tokens; this engine allows 3"):
        engine.step([SequenceStep(engine.open(), [1], Draft((1, 2, 3, 4)))], None)
    assert engine.max_verify_rows == 4


def test_costs_are_measured_as_far_as_drafts_go(open_engine):
    engine = open_engine(max_draft_len=3)
    measured, _ = measure(engine, 3)
    assert sorted(measured) == [1, 2, 3, 4]
    assert sorted(verify_costs(engine, context=8, repeats=1)) == [1, 2, 3]
    assert idle(engine)
    with pytest.raises(QuasarError, match="engine e runs requests and has no passes to time"), ExitStack() as stack:
        engine_curves("e", engine, (1,), stack)


def test_memory_for_keys_and_values_is_not_ours_to_bound(open_engine):
    engine = open_engine()
    with pytest.raises(QuasarError, match=r"kv_cache_memory_bytes is 1000; .*leave it out"):
        Runner(engine, kv_cache_memory_bytes=1000)
    assert Runner(engine).max_seq_len == 256
