"""Bans, biases and penalties against plain formulas, row by row of a verify block, and the field cases about them."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from stubs import ByteTokenizer, SamplingDrafter, StubDrafter, StubEngine, random_logits

from quasar_trt.errors import QuasarError
from quasar_trt.logits_processors import LogitsProcessors
from quasar_trt.runner import Runner
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams

VOCAB = 12
PROMPT = [1, 2, 2, 3]


def double(_ids, row):
    return row * 2


def plus_last(ids, row):
    row[ids[-1] if ids else 0] += 1.5
    return row


def plain(row, params: SamplingParams, prompt, emitted, end=(), bad_words=()) -> np.ndarray:
    """The processed row by the definitions of docs/sampling.md, one token after the other."""
    row = [float(value) for value in row]
    for token in range(len(row)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = -np.inf
    for word in bad_words:
        if len(word) <= len(emitted) + 1 and list(emitted[len(emitted) - len(word) + 1 :]) == word[:-1]:
            row[word[-1]] = -np.inf
    for token in end if len(emitted) < params.min_tokens else ():
        row[token] = -np.inf
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for processor in params.logits_processors:
        row = list(processor(list(emitted), np.float32(row)))
    for token in {*prompt, *emitted}:
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(emitted):
        row[token] -= params.frequency_penalty * emitted.count(token)
        row[token] -= params.presence_penalty
    return np.array(row)


ALL = {
    "presence_penalty": 0.7,
    "frequency_penalty": -0.3,
    "repetition_penalty": 1.3,
    "min_tokens": 5,
    "logit_bias": {3: 1.0, 8: -2.0},
    "allowed_token_ids": [1, 2, 3, 5, 8, 9, 10],
    "logits_processors": [double, plus_last],
}


@pytest.mark.parametrize("params", [*({name: value} for name, value in ALL.items()), {"bad_words": ["x"]}, ALL])
def test_processed_rows_equal_plain_formulas(params):
    """Blocks of drafts over a context that grows by part of each; rows of a block in order, again, and after others."""
    bad_words = [[5], [2, 3], [2, 2, 9]]
    generator = np.random.default_rng(3)
    params = SamplingParams(**params)
    context = list(PROMPT)
    processors = LogitsProcessors(params, context, [2, 5], bad_words)
    for _ in range(12):
        drafted = generator.integers(0, VOCAB, 4).tolist()
        for count in (0, 1, 2, 3, 4, 2, 0):
            row = generator.normal(0, 2, VOCAB).astype(np.float32)
            emitted = context[len(PROMPT) :] + drafted[:count]
            before = row.copy()
            found = processors(row, drafted[:count])
            np.testing.assert_allclose(
                found, plain(row, params, PROMPT, emitted, [2, 5], bad_words), rtol=1e-5, atol=1e-6
            )
            np.testing.assert_array_equal(row, before)
        context += drafted[: int(generator.integers(0, 5))]


def test_requests_without_such_parameters_have_no_processors():
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, stop="x", logprobs=2, seed=3)
    assert LogitsProcessors.for_request(params, PROMPT, [2], []) is None


def generate(logits, params: SamplingParams, draft=None, prompt=(1,), vocab: int = 8, eos=()):
    """(completion, acceptance of each pass) with a drafter that always proposes `draft`."""
    drafter = None if draft is None else StubDrafter(lambda context, limit: list(draft))
    engine = StubEngine(logits, vocab)
    runner = Runner(engine, drafter=drafter, tokenizer=ByteTokenizer(), eos_token_ids=eos)
    (output,) = runner.generate(list(prompt), params)
    return output.outputs[0], [acceptance.num_accepted_tokens for (acceptance,) in engine.accepted]


def five_then_six(_prefix):
    row = np.full(8, -10, np.float32)
    row[5:7] = 2.0, 1.5
    return row


@pytest.mark.parametrize("draft", [None, [5, 5, 5]])
def test_presence_penalty_within_a_verify_block(draft):
    params = SamplingParams(temperature=0, presence_penalty=1.0, max_tokens=4)
    completion, accepted = generate(five_then_six, params, draft)
    assert completion.token_ids == [5, 6, 5, 5]
    assert draft is None or accepted[0] == 1


@pytest.mark.parametrize("params", [{"logit_bias": {5: -100}}, {"allowed_token_ids": [6, 7]}])
@pytest.mark.parametrize("draft", [None, [5, 5]])
def test_banned_token_is_never_emitted(params, draft):
    completion, accepted = generate(five_then_six, SamplingParams(temperature=0, max_tokens=6, **params), draft)
    assert completion.token_ids == [6] * 6
    assert set(accepted) == {0}


def test_prompt_counts_for_the_repetition_penalty_only():
    for name, first in (("repetition_penalty", 6), ("presence_penalty", 5), ("frequency_penalty", 5)):
        params = SamplingParams(temperature=0, max_tokens=1, **{name: 1.5})
        assert generate(five_then_six, params, prompt=[5, 5])[0].token_ids == [first]


def test_bad_word_is_cut_before_its_last_token_wherever_it_stands():
    """Text "ab" may not appear; "a" and "b" may, and the prompt does not count."""

    def row(prefix):
        row = np.zeros(300, np.float32)
        row[97 if prefix[-1] != 97 else 98] = 9.0
        row[99] = 5.0
        return row

    params = SamplingParams(temperature=0, max_tokens=5, bad_words=["ab"])
    for draft in (None, [98, 97, 98]):
        assert generate(row, params, draft, prompt=[97], vocab=300)[0].token_ids == [98, 97, 99, 97, 99]


@pytest.mark.parametrize("draft", [None, [2, 2]])
def test_min_tokens_keeps_ends_away_so_long(draft):
    def row(_prefix):
        return np.float32([0, 0, 9, 8, 7, 0, 0, 0])

    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=3, stop_token_ids=[3])
    completion, _ = generate(row, params, draft, eos=[2])
    assert (completion.token_ids, completion.finish_reason) == ([4, 4, 4, 2], "stop")
    ignoring = SamplingParams(temperature=0, max_tokens=5, min_tokens=3, ignore_eos=True)
    assert generate(row, ignoring, draft, eos=[2])[0].token_ids == [3, 3, 3, 2, 2]


def test_processor_sees_the_ids_emitted_before_its_row():
    seen = []

    def look(ids, row):
        seen.append(tuple(ids))
        return row

    params = SamplingParams(temperature=0, max_tokens=4, logits_processors=[look])
    generate(five_then_six, params, [5, 5, 5])
    assert seen == [(), (5,), (5, 5), (5, 5, 5)]


def fails(_ids, row):
    raise KeyError("x")


def shrinks(_ids, row):
    return row[:3]


def blanks(_ids, row):
    return np.full_like(row, np.nan)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logits_processors": [fails]}, "logits processor fails failed: KeyError: 'x'"),
        (
            {"logits_processors": [shrinks]},
            r"logits processor shrinks returned an array of shape \(3,\); allowed: \(8,\)",
        ),
        (
            {"logits_processors": [blanks]},
            "after 0 emitted tokens no token with a finite logit is left; .*logits_processors",
        ),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "relax one of: allowed_token_ids, min_tokens"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_request_without_a_token_left_ends_alone_with_an_error(params, message, temperature):
    engine = StubEngine(five_then_six, 8)
    runner = Runner(engine, eos_token_ids=[2])
    each = [SamplingParams(temperature=temperature, max_tokens=3, **more) for more in (params, {})]
    bad, good = (output.outputs[0] for output in runner.generate([[1], [1]], each))
    assert (bad.token_ids, bad.finish_reason) == ([], "error")
    with pytest.raises(QuasarError, match=message):
        raise QuasarError(bad.stop_reason)
    assert (len(good.token_ids), good.finish_reason) == (3, "length")
    assert not engine.caches


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [8]}, "stop_token_ids has token id 8; allowed: 0 to 7"),
        ({"logit_bias": {9: 1}}, "logit_bias has token id 9; allowed: 0 to 7"),
        ({"allowed_token_ids": [1, 8]}, "allowed_token_ids has token id 8"),
        ({"logprobs": 9}, "logprobs is 9; allowed: at most the vocabulary's 8, or -1"),
        ({"prompt_logprobs": 9}, "prompt_logprobs is 9; allowed"),
        ({"stop": "x"}, r"stop is \('x',\), but this engine has no tokenizer"),
        ({"bad_words": ["x"]}, "bad_words is .*, but this engine has no tokenizer"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(params, message):
    engine = StubEngine(five_then_six, 8)
    with pytest.raises(QuasarError, match=message):
        Runner(engine).generate([1], SamplingParams(**params))
    assert not engine.passes


def test_drafter_with_probabilities_keeps_the_distribution_of_penalized_rows():
    """4 000 seeded requests of 3 tokens over 4 ids; every share within 0.027 of the target's (3.4 standard deviations)."""
    count, vocab, prompt = 4000, 4, (1, 2)
    target, other = (functools.cache(random_logits(vocab, seed=seed, spread=1.0)) for seed in (1, 2))
    params = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.4, "min_p": 0.1}

    expected = np.zeros((3, vocab))
    weights = {(): 1.0}
    sampler = Sampler(SamplingParams(min_p=0.1))
    for position in range(3):
        longer = {}
        for (emitted, weight), token in itertools.product(weights.items(), range(vocab)):
            row = plain(target((*prompt, *emitted)), SamplingParams(**params), prompt, emitted)
            share = weight * sampler.target(row.astype(np.float32)).probability(token)
            expected[position, token] += share
            longer[(*emitted, token)] = share
        weights = longer

    runner = Runner(StubEngine(target, vocab), drafter=SamplingDrafter(other, num_speculative_tokens=2))
    each = [SamplingParams(seed=seed, max_tokens=3, **params) for seed in range(count)]
    emitted = np.array([output.outputs[0].token_ids for output in runner.generate([list(prompt)] * count, each)])
    found = np.stack([np.bincount(emitted[:, position], minlength=vocab) for position in range(3)]) / count
    np.testing.assert_allclose(found, expected, atol=0.027)
    assert 0.2 < runner.stats.acceptance_rate < 0.95
