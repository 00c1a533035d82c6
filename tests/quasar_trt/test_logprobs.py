"""Log probabilities are the model's own, one entry per token, with and without drafts."""

from __future__ import annotations

import numpy as np
import pytest
from stubs import ByteTokenizer, StubDrafter, StubEngine, chain_logits, perfect_rule, random_logits

from quasar_trt.logprobs import by_token, token_logprobs
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VOCAB = 30
LOGITS = random_logits(VOCAB, seed=4)
PROMPT = [1, 2, 3, 1, 2]


def plain(row, token: int, count: int) -> dict[int, tuple[float, int]]:
    """{token: (log probability, rank)} by one stable sort, float64."""
    row = row.astype(np.float64)
    values = row - row.max() - np.log(np.exp(row - row.max()).sum())
    order = np.argsort(-row, kind="stable").tolist()
    ids = [token, *order[: len(row) if count < 0 else count]]
    return {each: (values[each], order.index(each) + 1) for each in ids}


def assert_entry(entry, row, token: int, count: int) -> None:
    expected = plain(row, token, count)
    assert list(entry) == list(expected)
    assert [each.rank for each in entry.values()] == [rank for _, rank in expected.values()]
    np.testing.assert_allclose(
        [each.logprob for each in entry.values()], [value for value, _ in expected.values()], atol=1e-5
    )


@pytest.mark.parametrize("count", [0, 1, 3, VOCAB, -1])
def test_entry_equals_a_plain_sort(count):
    generator = np.random.default_rng(1)
    rows = generator.normal(0, 3, VOCAB), generator.integers(0, 4, VOCAB), np.zeros(VOCAB)
    for row in map(np.float32, rows):
        for token in (0, 7, VOCAB - 1, int(row.argmax())):
            assert_entry(by_token(token_logprobs(row, token, count), None), row, token, count)


@pytest.mark.parametrize("draft", [None, [0, 0]])
def test_accepted_and_bonus_tokens_have_an_entry_each(draft):
    drafter = None if draft is None else StubDrafter(lambda context, limit: draft[:limit])
    runner = Runner(StubEngine(lambda prefix: np.float32([2, 1, 0]), 3), drafter=drafter)
    completion = runner.generate([1], SamplingParams(temperature=0, max_tokens=3, logprobs=2))[0].outputs[0]
    assert completion.token_ids == [0, 0, 0]
    for entry in completion.logprobs:
        assert [(token, round(each.logprob, 4), each.rank) for token, each in entry.items()] == [
            (0, -0.4076, 1),
            (1, -1.4076, 2),
        ]
    assert completion.cumulative_logprob == pytest.approx(3 * -0.407606, abs=1e-5)


@pytest.mark.parametrize("num_speculative_tokens", [None, 3])
@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_entries_are_raw_whatever_the_parameters_and_chunks(num_speculative_tokens, max_rows):
    params = SamplingParams(
        temperature=0.5,
        seed=1,
        max_tokens=12,
        top_k=3,
        presence_penalty=1.5,
        logit_bias={5: 3.0},
        logprobs=2,
        prompt_logprobs=1,
    )
    drafter = num_speculative_tokens and StubDrafter(perfect_rule(LOGITS), num_speculative_tokens)
    engine = StubEngine(LOGITS, VOCAB, max_rows=max_rows)
    (output,) = Runner(engine, drafter=drafter).generate(PROMPT, params)
    completion = output.outputs[0]
    context = PROMPT + completion.token_ids
    assert len(completion.logprobs) == len(completion.token_ids) == 12
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPT)
    for position, entry in enumerate([*output.prompt_logprobs[1:], *completion.logprobs], start=1):
        count = 1 if position < len(PROMPT) else 2
        assert_entry(entry, LOGITS(tuple(context[:position])), context[position], count)
    assert (output.metrics.num_emitted_tokens, len(engine.caches)) == (12, 0)


def test_scored_prompt_changes_neither_ids_nor_counts():
    for prompt in (PROMPT, [4]):
        outputs = []
        for more in ({}, {"prompt_logprobs": 0}):
            runner = Runner(StubEngine(LOGITS, VOCAB, max_rows=4), drafter=StubDrafter(perfect_rule(LOGITS), 2))
            (output,) = runner.generate(prompt, SamplingParams(temperature=0, max_tokens=9, **more))
            counts = (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens)
            outputs.append((output.outputs[0].token_ids, counts, len(output.prompt_logprobs or prompt)))
        assert outputs[0] == outputs[1] and outputs[0][2] == len(prompt)


@pytest.mark.parametrize("per_step", [1, 3, 13])
def test_ids_entries_text_and_counts_end_with_the_stop_text(per_step):
    chain = list(b"xxENDyyyyyyyy")
    drafter = (
        StubDrafter(lambda context, limit: chain[len(context) - 1 :][:limit], per_step - 1) if per_step > 1 else None
    )
    runner = Runner(StubEngine(chain_logits(chain, 1, 257), 257), tokenizer=ByteTokenizer(), drafter=drafter)
    params = SamplingParams(temperature=0, max_tokens=13, stop="END", logprobs=0)
    (output,) = runner.generate([1], params)
    completion = output.outputs[0]
    assert (completion.text, completion.stop_reason) == ("xx", "END")
    assert bytes(completion.token_ids) == b"xxEND"
    assert [list(entry) for entry in completion.logprobs] == [[token] for token in b"xxEND"]
    assert output.metrics.num_emitted_tokens == 5
    pieces = list(runner.stream([1], params))
    assert "".join(piece.text for piece in pieces) == "xx"
    assert [list(entry) for piece in pieces for entry in piece.logprobs] == [[token] for token in b"xxEND"]
    assert [piece.stop_reason for piece in pieces][-1] == "END"


def test_tokens_come_with_their_text():
    runner = Runner(StubEngine(chain_logits([104, 256], 1, 257), 257), tokenizer=ByteTokenizer())
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0)
    entries = runner.generate([1], params)[0].outputs[0].logprobs
    assert [each.decoded_token for entry in entries for each in entry.values()] == ["h", "<end>"]


def test_bad_row_of_a_scored_prompt_is_an_error():
    def logits(prefix):
        return LOGITS(prefix) * (np.nan if len(prefix) == 2 else 1)

    engine = StubEngine(logits, VOCAB)
    bad, good = Runner(engine).generate([PROMPT, [3]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert (bad.outputs[0].finish_reason, bad.prompt_logprobs) == ("error", None)
    assert good.outputs[0].finish_reason == "length" and not engine.caches
