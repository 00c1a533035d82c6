"""Several completions of one prompt: each with its own noise, all from one pass over the prompt."""

from __future__ import annotations

import dataclasses

import pytest
from stubs import ByteTokenizer, StubDrafter, StubEngine, perfect_rule, random_logits

from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VOCAB = 6
LOGITS = random_logits(VOCAB, seed=3)
PROMPT = [1, 2, 3, 1, 2, 0, 4, 5]
PARAMS = SamplingParams(n=3, seed=7, max_tokens=10)


def open_runner(drafted: bool = False, fork: bool = True, **options) -> tuple[Runner, StubEngine]:
    engine = StubEngine(LOGITS, VOCAB, max_rows=options.pop("max_rows", 64))
    engine.capabilities = dataclasses.replace(engine.capabilities, fork=fork)
    drafter = StubDrafter(perfect_rule(LOGITS), 3) if drafted else None
    return Runner(engine, drafter=drafter, **options), engine


def ids(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def test_completions_are_numbered_reproducible_and_different():
    (output,) = open_runner()[0].generate([PROMPT], PARAMS)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(each) for each in ids(output)}) == 3
    assert ids(open_runner()[0].generate([PROMPT], PARAMS)[0]) == ids(output)
    assert output.metrics.num_emitted_tokens == 30
    (alone,) = open_runner()[0].generate([PROMPT], dataclasses.replace(PARAMS, n=1))
    assert ids(alone)[0] == ids(output)[0]
    unseeded = SamplingParams(n=2, max_tokens=30)
    first, second = ids(open_runner()[0].generate([PROMPT], unseeded)[0])
    assert first != second


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"max_batch_size": 1}, {"max_batch_size": 2}, {"max_rows": 4}, {"max_rows": 1}]
)
def test_completions_do_not_depend_on_how_they_run(drafted, fork, options):
    expected = ids(open_runner()[0].generate([PROMPT], PARAMS)[0])
    runner, engine = open_runner(drafted, fork, **options)
    other = SamplingParams(seed=1, max_tokens=4)
    outputs = runner.generate([[3], PROMPT, [5, 5]], [other, PARAMS, other])
    assert ids(outputs[1]) == expected
    assert not engine.caches


@pytest.mark.parametrize("prompt", [PROMPT, [4]])
def test_prompt_is_computed_once(prompt):
    runner, engine = open_runner()
    runner.generate([prompt], PARAMS)
    committed = [token for step in engine.passes for tokens in step.tokens for token in tokens]
    assert len(committed) == len(prompt) + 2 + 3 * (
        PARAMS.max_tokens - 1
    )  # the last row of the prompt is each one's own
    runner, engine = open_runner(fork=False)
    runner.generate([prompt], PARAMS)
    committed = [token for step in engine.passes for tokens in step.tokens for token in tokens]
    assert len(committed) == 3 * (len(prompt) + PARAMS.max_tokens - 1)


def test_others_go_on_while_completions_wait_for_their_prompt():
    runner, engine = open_runner(max_rows=4)
    runner.generate([PROMPT, [3]], [PARAMS, SamplingParams(seed=1, max_tokens=4)])
    assert engine.passes[0].sequences == [0, 1]


@pytest.mark.parametrize("drafted", [False, True])
def test_streams_of_all_completions_interleave(drafted):
    runner, engine = open_runner(drafted)
    (output,) = runner.generate([PROMPT], PARAMS)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    reasons = {}
    for piece in runner.stream(PROMPT, PARAMS):
        found[piece.index] += piece.token_ids
        reasons[piece.index] = piece.finish_reason
    assert list(found.values()) == ids(output)
    assert set(reasons.values()) == {"length"} and not engine.caches


def test_stream_closed_early_frees_every_sequence():
    runner, engine = open_runner()
    stream = runner.stream(PROMPT, PARAMS)
    for _ in range(5):
        next(stream)
    stream.close()
    assert not engine.caches


def test_text_of_each_completion_ends_by_itself():
    engine = StubEngine(random_logits(257, spread=4.0), 257)
    runner = Runner(engine, tokenizer=ByteTokenizer())
    params = SamplingParams(n=4, seed=2, max_tokens=30, stop=["a", "b", "c", "d", "e"])
    (output,) = runner.generate(["x"], params)
    found = dict.fromkeys(range(4), "")
    for piece in runner.stream("x", params):
        found[piece.index] += piece.text
    assert list(found.values()) == [completion.text for completion in output.outputs]
    stopped = [completion for completion in output.outputs if completion.finish_reason == "stop"]
    assert stopped and all(chr(each.token_ids[-1]) == each.stop_reason not in each.text for each in stopped)


def test_completions_share_a_prompt_on_the_native_engine(engine_dirs):
    params = SamplingParams(n=3, seed=4, max_tokens=20, top_k=3)
    outputs = [
        Runner.from_dir(engine_dirs["INT8"], drafter=drafter, engine="cpu", threads=1).generate(
            "one two one two", params
        )[0]
        for drafter in (None, "ngram")
    ]
    assert ids(outputs[0]) == ids(outputs[1])
    assert len({tuple(each) for each in ids(outputs[0])}) == 3
