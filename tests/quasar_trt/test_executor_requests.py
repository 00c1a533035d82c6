"""Sampling parameters on TensorRT-LLM's executor: each acts as elsewhere, on every row, or is refused by name."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from llm_engines import llm_engine, stub_bindings
from stubs import ByteTokenizer, SamplingDrafter, StubDrafter, StubEngine, perfect_rule, random_logits

from quasar_trt.drafters.base import Draft
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines.executor_requests import ExecutorRequests
from quasar_trt.engines.sequence_sampling import SequenceSampling
from quasar_trt.errors import QuasarError
from quasar_trt.logprobs import Logprob
from quasar_trt.runner import Runner
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams

VOCAB = 130  # bytes below 128 are text
LOGITS = random_logits(VOCAB, seed=4, spread=1.0)
PROMPT = list(b"abcab")
FAVOURITES = perfect_rule(LOGITS)(PROMPT, 3)

# parameter -> values that act at temperature 0, with what else is set
ACTING = {
    "n": [],
    "presence_penalty": [{"presence_penalty": 1.5}, {"presence_penalty": -0.5}],
    "frequency_penalty": [{"frequency_penalty": 1.5}],
    "repetition_penalty": [{"repetition_penalty": 3.0}],
    "temperature": [],
    "top_p": [],
    "top_k": [],
    "seed": [],
    "stop": [{"stop": [chr(FAVOURITES[2])]}],
    "stop_token_ids": [{"stop_token_ids": [FAVOURITES[2]]}],
    "bad_words": [
        {"bad_words": [chr(FAVOURITES[0])]},
        {"bad_words": [chr(FAVOURITES[0]) + chr(FAVOURITES[1])]},
    ],
    "ignore_eos": [{"ignore_eos": True}],
    "max_tokens": [{"max_tokens": 5}],
    "min_tokens": [{"min_tokens": 9}],
    "logprobs": [{"logprobs": 0}, {"logprobs": 3}, {"logprobs": -1}],
    "logit_bias": [{"logit_bias": {FAVOURITES[0]: -100.0}}, {"logit_bias": {9: 3.0, 10: 2.5}}],
    "allowed_token_ids": [
        {"allowed_token_ids": [10, 20, 30, 40]},
        {"allowed_token_ids": [10, 20], "logit_bias": {10: -50.0}},
    ],
    "skip_special_tokens": [{"skip_special_tokens": False}],
    "include_stop_str_in_output": [{"stop": [chr(FAVOURITES[2])], "include_stop_str_in_output": True}],
}
REFUSED = {
    "min_p": ({"min_p": 0.1}, "min_p is 0.1; engine 'tensorrt_llm' allows none"),
    "prompt_logprobs": ({"prompt_logprobs": 0}, "prompt_logprobs is 0; engine 'tensorrt_llm' allows none"),
    "logits_processors": ({"logits_processors": [lambda ids, row: row]}, "logits_processors is .*; engine 'tensorrt_llm' allows"),
}  # fmt: skip


@pytest.fixture
def open_engine(tmp_path):
    return lambda logits=LOGITS, vocab=VOCAB: llm_engine(tmp_path / "engine", logits, vocab)


def run(engine, params, drafter=None, eos=(FAVOURITES[1],)):
    """What a caller sees: ids, reasons, text and logprobs (tokens and ranks; values within rounding)."""
    runner = Runner(engine, tokenizer=ByteTokenizer(), drafter=drafter, eos_token_ids=eos)
    (output,) = runner.generate([PROMPT], params)
    (completion,) = output.outputs
    entries = [
        {token: Logprob(round(each.logprob, 3), each.rank, each.decoded_token) for token, each in entry.items()}
        for entry in completion.logprobs or ()
    ]
    return completion.token_ids, completion.finish_reason, completion.stop_reason, completion.text, entries


def test_every_parameter_acts_or_is_refused():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {*ACTING, *REFUSED}


@pytest.mark.parametrize("drafter", [None, "ngram", "suffix", "perfect"])
@pytest.mark.parametrize("options", [each for options in ACTING.values() for each in options], ids=str)
def test_parameter_gives_what_it_gives_on_an_engine_of_logits(open_engine, options, drafter):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20} | options)
    expected = run(StubEngine(LOGITS, VOCAB), params)
    made = {"perfect": lambda: StubDrafter(perfect_rule(LOGITS), 4), None: lambda: None}
    drafter = made.get(drafter, lambda: make_drafter(drafter, {"num_speculative_tokens": 4}))()
    assert run(open_engine(), params, drafter) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_executor_cannot_do_is_refused_by_name_before_anything_runs(open_engine, name):
    engine = open_engine()
    options, message = REFUSED[name]
    with pytest.raises(QuasarError, match=message):
        Runner(engine).generate([PROMPT], SamplingParams(**options))
    assert not engine._executor.requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 2000}, "top_k is 2000; engine 'tensorrt_llm' allows at most 1024"),
        ({"allowed_token_ids": [1], "min_tokens": 2}, "allowed_token_ids .* alone"),
        ({"allowed_token_ids": [1], "bad_words": ["a"]}, "allowed_token_ids .* alone"),
    ],
)
def test_values_beyond_what_the_executor_can_do_are_refused(open_engine, options, message):
    runner = Runner(open_engine(), tokenizer=ByteTokenizer())
    with pytest.raises(QuasarError, match=message):
        runner.generate([PROMPT], SamplingParams(**options))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_additive_penalties_are_refused_where_the_executor_would_count_the_prompt(open_engine, monkeypatch, name):
    engine = open_engine()

    class Older:
        """SamplingConfig of release 1.0.0."""

    monkeypatch.setattr(engine._bindings, "SamplingConfig", Older)
    with pytest.raises(QuasarError, match=f"{name} is 0.5; .*count the prompt"):
        Runner(engine).generate([PROMPT], SamplingParams(**{name: 0.5}))


# --- above temperature 0: distributions


SMALL = 5
TARGET, OTHER = (functools.cache(random_logits(SMALL, seed=seed, spread=1.0)) for seed in (1, 2))
START = (1, 2)
FAVOURITE = int(TARGET(START).argmax())


def expected_shares(**filters) -> np.ndarray:
    """[position, token]: how likely each of the first three tokens is, by enumeration."""
    sampler = Sampler(SamplingParams(**filters))
    shares, weights = np.zeros((3, SMALL)), {START: 1.0}
    for position in range(3):
        longer = {}
        for (prefix, weight), token in itertools.product(weights.items(), range(SMALL)):
            share = weight * sampler.target(TARGET(prefix)).probability(token)
            shares[position, token] += share
            longer[(*prefix, token)] = share
        weights = longer
    return shares


DRAFTERS = {
    "none": lambda: None,
    "always the same ids": lambda: StubDrafter(lambda context, limit: [FAVOURITE] * limit, 2),
    "at times": lambda: StubDrafter(lambda context, limit: [1][: limit if context[-1] % 2 else 0], 2),
    "with probabilities": lambda: SamplingDrafter(OTHER, num_speculative_tokens=2),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.8},
    ],
    ids=str,
)
def test_output_has_the_targets_distribution_with_every_drafter(open_engine, filters, drafter):
    """1 500 seeded requests of 3 tokens over 5 ids; every share within 0.05 of the target's (3.9 standard deviations)."""
    engine = open_engine(TARGET, SMALL)
    runner = Runner(engine, drafter=DRAFTERS[drafter]())
    params = [SamplingParams(seed=seed, max_tokens=3, **filters) for seed in range(1500)]
    outputs = runner.generate([list(START)] * len(params), params)
    emitted = np.array([output.outputs[0].token_ids for output in outputs])
    shares = np.stack([np.bincount(emitted[:, position], minlength=SMALL) for position in range(3)]) / len(params)
    np.testing.assert_allclose(shares, expected_shares(**filters), atol=0.05)
    streamed = [request.streaming for request in engine._executor.requests]
    if drafter == "none":
        assert all(streamed) if "top_p" not in filters else not any(streamed)
    else:
        assert 0 < runner.stats.num_accepted_tokens < runner.stats.num_draft_tokens


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_penalties_come_before_temperature(open_engine, temperature):
    """TensorRT-LLM penalises what is divided already."""
    params = SamplingParams(temperature=temperature, presence_penalty=1.0, frequency_penalty=1.0, seed=0)
    requests = ExecutorRequests(stub_bindings(TARGET, SMALL), SMALL, SMALL)
    config = requests.make(
        [1, 2, 3], SequenceSampling(params, lambda position: position, 2, 9), Draft()
    ).sampling_config
    assert config.presence_penalty == config.frequency_penalty == pytest.approx(1 / temperature, rel=1e-5)
    assert (config.prompt_ignore_length, config.seed) == (2, 3)


def test_draft_logits_are_those_of_the_drafts_own_distribution():
    """Padded to the head of all ranks, and never a certainty."""
    requests = ExecutorRequests(stub_bindings(TARGET, SMALL), SMALL, 8)
    sampling = SequenceSampling(SamplingParams(), lambda position: 0, 1, 9)
    one_hot = requests.make([1], sampling, Draft((3, 0))).external_draft_tokens_config.logits
    assert (one_hot.dtype, one_hot.shape) == (torch.float32, (2, 8))
    q = one_hot[:, :SMALL].softmax(1)
    torch.testing.assert_close(q, torch.eye(SMALL)[[3, 0]], atol=1e-6, rtol=0)
    assert (q.max(1).values < 1).all()
    probs = np.float32([[0.5, 0.5, 0, 0, 0]])
    drafted = requests.make([1], sampling, Draft((1,), probs=probs)).external_draft_tokens_config.logits
    torch.testing.assert_close(drafted[:, :SMALL].softmax(1), torch.from_numpy(probs), atol=1e-6, rtol=0)
    greedy = SequenceSampling(SamplingParams(temperature=0), lambda position: 0, 1, 9)
    assert requests.make([1], greedy, Draft((3, 0))).external_draft_tokens_config.logits is None


def test_bias_leaves_nothing_but_allowed_ids():
    requests = ExecutorRequests(stub_bindings(TARGET, SMALL), SMALL, 8)
    params = SamplingParams(allowed_token_ids=[1, 2], logit_bias={2: 1.5, 4: 9.0})
    bias = requests.make([1], SequenceSampling(params, lambda position: 0, 1, 9), Draft()).embedding_bias
    low = torch.finfo(torch.float32).min
    assert bias.dtype == torch.float32 and bias.tolist() == [low, 0.0, 1.5, low, low]
