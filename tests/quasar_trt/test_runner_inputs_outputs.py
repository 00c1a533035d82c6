"""What goes into a runner and what comes out: prompts, sampling parameters, text, metrics."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from stubs import ByteTokenizer, StubDrafter, StubEngine, chain_logits, random_logits

from quasar_trt.drafters.registry import make_drafter
from quasar_trt.errors import QuasarError
from quasar_trt.outputs import StreamOutput
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VOCAB = 6
LOGITS = random_logits(VOCAB, seed=3)
PROMPT = [1, 2, 3, 1, 2]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def test_text_of_completion_and_stream():
    text = "é世🙂"
    chain = [*text.encode(), 256]
    engine = StubEngine(chain_logits(chain, 2, 257), 257)
    drafter = StubDrafter(lambda context, limit: chain[len(context) - 2 :][:limit], num_speculative_tokens=4)
    runner = Runner(engine, tokenizer=ByteTokenizer(), drafter=drafter, eos_token_ids=[256])
    params = SamplingParams(temperature=0, max_tokens=50)
    output = runner.generate("ab", params)[0]
    assert (output.prompt, output.prompt_token_ids, output.outputs[0].text) == ("ab", [97, 98], text)
    assert output.outputs[0].token_ids == chain
    deltas = [piece.text for piece in runner.stream("ab", params)]
    assert "".join(deltas) == text and not any("\ufffd" in delta for delta in deltas)


def test_stream_of_ids_only_decodes_nothing():
    class Mute(ByteTokenizer):
        def decode(self, *_args, **_options):
            raise AssertionError("decoded")

    runner = Runner(StubEngine(random_logits(257), 257), tokenizer=Mute(), eos_token_ids=())
    params = SamplingParams(temperature=0, max_tokens=3)
    pieces = list(runner.stream("ab", params, detokenize=False))
    assert [token for piece in pieces for token in piece.token_ids] == runner.generate("ab", params)[0].outputs[
        0
    ].token_ids
    assert {piece.text for piece in pieces} == {""}
    with pytest.raises(AssertionError, match="decoded"):
        next(runner.stream("ab", params))


def test_stream_output_is_plain_data():
    piece = StreamOutput("a", [97], "stop", "a")
    assert dataclasses.asdict(piece) == {
        "text": "a",
        "token_ids": [97],
        "finish_reason": "stop",
        "stop_reason": "a",
        "logprobs": None,
        "index": 0,
        "origins": [],
        "text_offsets": [],
        "metrics": None,
    }
    assert pickle.loads(pickle.dumps(piece)) == piece


def test_text_is_empty_without_a_tokenizer():
    runner = Runner(StubEngine(LOGITS, VOCAB))
    assert runner.generate(PROMPT)[0].outputs[0].text == ""
    assert {output.text for output in runner.stream(PROMPT)} == {""}


def test_one_prompt_or_many():
    runner = Runner(StubEngine(random_logits(300), 300), tokenizer=ByteTokenizer())
    params = SamplingParams(temperature=0, max_tokens=3)
    one = runner.generate("a", params)[0].outputs[0].token_ids
    assert [output.outputs[0].token_ids for output in runner.generate(["a", [97], "a"], params)] == [one] * 3
    assert runner.generate(np.array([97]), params)[0].outputs[0].token_ids == one


def test_metrics_of_requests_add_up_to_the_runners():
    engine = StubEngine(LOGITS, VOCAB)
    runner = Runner(engine, drafter=make_drafter("ngram"))
    outputs = runner.generate([[1, 2], [3], [4, 4]], GREEDY)
    for name in ("num_verify_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        assert sum(getattr(output.metrics, name) for output in outputs) == getattr(runner.stats, name)
    assert runner.stats.num_emitted_tokens == 120
    assert sum(runner.stats.num_accepted_tokens_per_pos) == runner.stats.num_accepted_tokens
    assert runner.stats.draft_seconds > 0 and runner.stats.verify_seconds > 0 and runner.stats.accept_seconds > 0


def test_sampling_parameters_of_each_prompt():
    runner = Runner(StubEngine(LOGITS, VOCAB))
    each = [SamplingParams(temperature=0, max_tokens=3), SamplingParams(seed=1, max_tokens=7)]
    expected = [runner.generate(PROMPT, params)[0].outputs[0].token_ids for params in each]
    assert [output.outputs[0].token_ids for output in runner.generate([PROMPT, PROMPT], each)] == expected
    assert runner.generate(PROMPT, each[1:])[0].outputs[0].token_ids == expected[1]
    assert runner.generate([], []) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], [2]], [GREEDY], "sampling_params has 1 entries; allowed: one per prompt, 2"),
        ([1, 2], [GREEDY, GREEDY], "sampling_params has 2 entries; allowed: one per prompt, 1"),
        ([1], [], "sampling_params has 0 entries"),
        ([1], {"temperature": 0}, "sampling_params is {'temperature': 0}; allowed: SamplingParams"),
        ([[1], [2]], [GREEDY, None, None], "sampling_params has 3 entries"),
        ([[1], [2]], [GREEDY, 0.5], "sampling_params is 0.5; allowed: SamplingParams"),
        (None, GREEDY, "a prompt is None; allowed: text, or a list of integer token ids"),
        (7, GREEDY, "a prompt is 7; allowed"),
        (b"ab", GREEDY, "a prompt is b'ab'; allowed"),
        ([None], GREEDY, "a prompt is None; allowed"),
        ([1.0, 2.0], GREEDY, "a prompt is 1.0; allowed"),
        ([1, 2.5], GREEDY, r"a prompt is \[1, 2.5\]; allowed"),
        ([1, "a"], GREEDY, r"a prompt is \[1, 'a'\]; allowed"),
        (["a", 1], GREEDY, "a prompt is 1; allowed"),
        (["a", [1, None]], GREEDY, r"a prompt is \[1, None\]; allowed"),
        ([[[1]]], GREEDY, r"a prompt is \[\[1\]\]; allowed"),
        (np.array([1.0, 2.0]), GREEDY, "a prompt is 1.0; allowed"),
        ({1: 2}, GREEDY, "a prompt is {1: 2}; allowed"),
    ],
)
def test_wrong_type_is_refused_before_anything_runs(prompts, params, message):
    engine = StubEngine(random_logits(300), 300)
    with pytest.raises(QuasarError, match=message):
        Runner(engine, tokenizer=ByteTokenizer()).generate(prompts, params)
    assert not engine.passes


def test_wrong_type_is_refused_by_a_stream_at_once():
    runner = Runner(StubEngine(LOGITS, VOCAB))
    for prompt in (None, [1.0], [[1]], ["a"]):
        with pytest.raises(QuasarError, match="a prompt is"):
            runner.stream(prompt, GREEDY)
    with pytest.raises(QuasarError, match="sampling_params is"):
        runner.stream([1], [GREEDY])


def test_arrays_are_prompts():
    runner = Runner(StubEngine(LOGITS, VOCAB))
    expected = runner.generate([[1, 2], [3, 4]], GREEDY)
    found = runner.generate(np.array([[1, 2], [3, 4]]), GREEDY)
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    assert [output.prompt_token_ids for output in found] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("eos_token_ids", "expected"), [(None, (256,)), ((), ()), ([3, 4], (3, 4))])
def test_end_of_sequence_ids_default_to_the_tokenizers(eos_token_ids, expected):
    engine = StubEngine(random_logits(257), 257)
    assert Runner(engine, tokenizer=ByteTokenizer(), eos_token_ids=eos_token_ids).eos_token_ids == expected
    assert Runner(engine).eos_token_ids == ()
