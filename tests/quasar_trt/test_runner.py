"""The speculative step and everything around it, on an engine with prescribed logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from stubs import (
    ByteTokenizer,
    StubDrafter,
    StubEngine,
    chain_logits,
    perfect_rule,
    random_logits,
)

from quasar_trt.drafters.registry import make_drafter
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VOCAB = 6
LOGITS = random_logits(VOCAB, seed=3)  # few ids, so that drafts are accepted and rejected alike
PROMPT = [1, 2, 3, 1, 2]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def generate(prompts, params, drafter=None, logits=LOGITS, **runner_options):
    """(ids per prompt, engine, runner) on a fresh stub engine."""
    engine_options = {name: runner_options.pop(name) for name in ("max_seq_len", "max_rows") if name in runner_options}
    engine = StubEngine(logits, VOCAB, **engine_options)
    runner = Runner(engine, drafter=drafter, **runner_options)
    outputs = runner.generate(prompts, params)
    return [output.outputs[0].token_ids for output in outputs], engine, runner


def ngram(num_speculative_tokens: int = 5):
    return make_drafter("ngram", {"num_speculative_tokens": num_speculative_tokens})


def plain_decode(prompt, params, logits=LOGITS, eos=()) -> list[int]:
    """What a request must give, by a loop of one token after the other (temperature 0)."""
    ids = list(prompt)
    while len(ids) - len(prompt) < params.max_tokens:
        ids.append(int(np.argmax(logits(tuple(ids)))))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


# --- drafted ids are plain ids


@pytest.mark.parametrize("num_speculative_tokens", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_drafted_ids_equal_plain_ids(num_speculative_tokens, temperature):
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=0, max_tokens=40)
    (plain,), _, _ = generate(PROMPT, params)
    (drafted,), _, runner = generate(PROMPT, params, ngram(num_speculative_tokens))
    assert drafted == plain
    assert 0 < runner.stats.num_accepted_tokens < runner.stats.num_draft_tokens


def test_greedy_ids_are_the_argmax_chain():
    (ids,), _, _ = generate(PROMPT, GREEDY, ngram())
    assert ids == plain_decode(PROMPT, GREEDY)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_perfect_and_useless_drafters_give_the_same_ids(temperature):
    params = SamplingParams(temperature=temperature, seed=9, max_tokens=20)
    (plain,), _, _ = generate(PROMPT, params)
    perfect = StubDrafter(lambda context, limit: plain[len(context) - len(PROMPT) :][:limit])
    useless = StubDrafter(lambda context, limit: [(t + 1) % VOCAB for t in plain[len(context) - len(PROMPT) :][:limit]])
    for drafter, rate in ((perfect, 1.0), (useless, 0.0)):
        (ids,), _, runner = generate(PROMPT, params, drafter)
        assert ids == plain
        assert runner.stats.acceptance_rate == rate


def test_greedy_drafts_with_probabilities_give_the_same_ids():
    drafter = StubDrafter(lambda context, limit: ([2] * limit, np.full((limit, VOCAB), 1 / VOCAB, np.float32)))
    (ids,), _, _ = generate(PROMPT, GREEDY, drafter)
    assert ids == plain_decode(PROMPT, GREEDY)


def test_ties_go_to_the_lowest_id_with_and_without_a_draft():
    def tie(_prefix):
        return np.float32([0, 0, 1, 0, 0, 1])

    params = SamplingParams(temperature=0, max_tokens=1)
    for drafter in (None, StubDrafter(lambda context, limit: [5][:limit])):
        (ids,), _, _ = generate([1], params, drafter, logits=tie)
        assert ids == [2]
    params = SamplingParams(temperature=0, max_tokens=3)
    (ids,), _, runner = generate([1], params, StubDrafter(lambda context, limit: [5][:limit]), logits=tie)
    assert ids == [2, 2, 2] and runner.stats.num_accepted_tokens == 0


# --- seeds and neighbours


def test_seeded_request_does_not_depend_on_neighbours_or_history():
    a = SamplingParams(seed=7, max_tokens=12)
    (alone,), _, _ = generate(PROMPT, a)
    engine = StubEngine(LOGITS, VOCAB)
    runner = Runner(engine, drafter=ngram())
    others = [
        runner.stream([3, 1], SamplingParams(seed=9, max_tokens=30)),
        runner.stream([4], SamplingParams(max_tokens=30)),
    ]
    for other in others:
        next(other)
    with_neighbours = runner.generate(PROMPT, a)[0].outputs[0].token_ids
    for _ in range(50):
        runner.generate([2], SamplingParams(max_tokens=1))
    assert with_neighbours == alone == runner.generate(PROMPT, a)[0].outputs[0].token_ids


def test_seed_zero_is_a_seed_and_no_seed_is_fresh():
    zero = [generate(PROMPT, SamplingParams(seed=0, max_tokens=30))[0] for _ in range(2)]
    fresh = [generate(PROMPT, SamplingParams(max_tokens=30))[0] for _ in range(2)]
    assert zero[0] == zero[1]
    assert fresh[0] != fresh[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ragged_batch_equals_solo_runs(temperature):
    """Prompts of 1, 5 and 9 ids whose drafts are right up to 0, 2 and 5 tokens, one ending early."""
    prompts = [[4], [1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0, 1, 2, 3]]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=24)
    solo = [generate(prompt, params)[0][0] for prompt in prompts]
    solo_of = {prompt[0]: ids for prompt, ids in zip(prompts, solo, strict=True)}
    right = {prompt[0]: count for prompt, count in zip(prompts, (0, 2, 5), strict=True)}
    lengths = {prompt[0]: len(prompt) for prompt in prompts}

    def rule(context, limit):
        first = context[0]
        draft = solo_of[first][len(context) - lengths[first] :][:limit]
        return [token if i < right[first] else (token + 1) % VOCAB for i, token in enumerate(draft)]

    together, engine, _ = generate(prompts, params, StubDrafter(rule, num_speculative_tokens=6))
    assert together == solo
    assert [acceptance.num_accepted_tokens for acceptance in engine.accepted[0]] == [0, 2, 5]
    assert sorted(engine.closed) == [0, 1, 2] and not engine.caches


def test_waiting_requests_join_as_others_finish():
    prompts = [[i % VOCAB, i // VOCAB] for i in range(7)]
    params = SamplingParams(temperature=0, max_tokens=5)
    together, engine, _ = generate(prompts, params, ngram(), max_batch_size=3)
    assert together == [plain_decode(prompt, params) for prompt in prompts]
    assert max(len(step.sequences) for step in engine.passes) == 3
    assert len(engine.closed) == 7


# --- finishing and limits


def test_end_of_sequence_inside_an_accepted_run():
    chain = [4, 5, 2, 3, 3]
    drafter = StubDrafter(lambda context, limit: [4, 5, 2, 3][:limit])
    engine = StubEngine(chain_logits(chain, 1, VOCAB), VOCAB)
    runner = Runner(engine, drafter=drafter, eos_token_ids=[2], tokenizer=ByteTokenizer())
    streamed = list(runner.stream([1], SamplingParams(temperature=0, max_tokens=50)))
    assert [(output.token_ids, output.finish_reason) for output in streamed] == [([4, 5, 2], "stop")]
    assert engine.accepted == [[engine.accepted[0][0]]] and engine.accepted[0][0].num_accepted_tokens == 3
    assert (runner.stats.num_emitted_tokens, runner.stats.num_accepted_tokens) == (3, 3)
    assert drafter.asked == [(0, 1)]
    assert drafter.calls == [("start", 0, (1,)), ("stop", 0)]


@pytest.mark.parametrize(("token", "reason", "stop_reason"), [(2, "stop", None), (5, "stop", 5), (4, "length", None)])
def test_finish_reason(token, reason, stop_reason):
    engine = StubEngine(chain_logits([1, token, 3], 1, VOCAB), VOCAB)
    output = (
        Runner(engine, eos_token_ids=[2, 5]).generate([0], SamplingParams(temperature=0, max_tokens=2))[0].outputs[0]
    )
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([1, token], reason, stop_reason)


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("drafted", [False, True])
def test_exactly_max_tokens(max_tokens, drafted):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    drafter = StubDrafter(perfect_rule(LOGITS), num_speculative_tokens=5) if drafted else None
    engine = StubEngine(LOGITS, VOCAB)
    (output,) = Runner(engine, drafter=drafter).generate(PROMPT, params)
    assert output.outputs[0].token_ids == plain_decode(PROMPT, params)
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.num_emitted_tokens == max_tokens
    assert output.metrics.num_verify_steps == (-(-max_tokens // 6) if drafted else max_tokens)


@pytest.mark.parametrize("drafted", [False, True])
def test_context_limit(drafted):
    prompt = [i % VOCAB for i in range(13)]
    drafter = StubDrafter(perfect_rule(LOGITS), num_speculative_tokens=5) if drafted else None
    engine = StubEngine(LOGITS, VOCAB, max_seq_len=16)
    (output,) = Runner(engine, drafter=drafter).generate(prompt, SamplingParams(temperature=0, max_tokens=50))
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].finish_reason == "length"
    assert max(position for step in engine.passes for positions in step.positions for position in positions) < 16


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([0] * 16, "has 16 tokens; allowed: at most 15.*--max-seq-len"),
        ([], None),
        ([[]], "no tokens"),
        ("", "no tokens"),
        ([1, VOCAB], f"token id {VOCAB}; allowed: 0 to {VOCAB - 1}"),
        ([[1], [-1]], "token id -1"),
    ],
)
def test_prompt_that_cannot_run_is_refused_before_anything_runs(prompt, message):
    engine = StubEngine(LOGITS, VOCAB, max_seq_len=16)
    runner = Runner(engine, tokenizer=ByteTokenizer())
    if message is None:
        assert runner.generate(prompt) == []
    else:
        with pytest.raises(QuasarError, match=message):
            runner.generate(prompt)
        with pytest.raises(QuasarError, match=message):
            runner.stream(prompt if not prompt or not isinstance(prompt[0], list) else prompt[-1])
    assert not engine.passes and not engine.closed


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(QuasarError, match="no tokenizer"):
        Runner(StubEngine(LOGITS, VOCAB)).generate("abc")


def test_drafter_beyond_the_engines_draft_limit_is_refused():
    with pytest.raises(QuasarError, match="num_speculative_tokens is 5; allowed: at most 4"):
        Runner(StubEngine(LOGITS, VOCAB), drafter=ngram(5), max_draft_len=4)


@pytest.mark.parametrize(("max_rows", "prompts"), [(4, [PROMPT]), (1, [PROMPT, [3]]), (5, [[1, 2] * 6, [3], [4, 5]])])
def test_row_budget_and_prompts_in_chunks(max_rows, prompts):
    params = SamplingParams(temperature=0, max_tokens=15)
    ids, engine, _ = generate(prompts, params, ngram(), max_rows=max_rows)
    assert ids == [plain_decode(prompt, params) for prompt in prompts]
    assert engine.passes[0].needs_logits[0] is (len(prompts[0]) <= max_rows - len(engine.passes[0].sequences) + 1)


def test_draft_comes_with_the_last_chunk_of_the_prompt():
    _, engine, _ = generate([1, 2, 3, 1, 2], SamplingParams(temperature=0, max_tokens=9), ngram(), max_rows=4)
    assert engine.passes[0].tokens == [[1, 2, 3, 1]] and engine.passes[0].drafts == [()]
    assert engine.passes[1].tokens == [[2]] and engine.passes[1].drafts == [(3, 1, 2)]


def test_cache_holds_what_was_committed():
    """Each pass starts where the committed and accepted tokens of the passes before it end."""
    (ids,), engine, _ = generate(PROMPT, GREEDY, ngram())
    context, start = PROMPT + ids, 0
    for step, (acceptance,) in zip(engine.passes, engine.accepted, strict=True):
        assert step.positions[0].start == start
        assert step.tokens[0] == context[start : start + len(step.tokens[0])]
        start += len(step.tokens[0]) + acceptance.num_accepted_tokens


@pytest.mark.parametrize("tree", [False, True])
def test_drafter_that_breaks_its_limit_is_an_error(tree):
    class Greedy(StubDrafter):
        def _propose_one(self, request):
            return super()._propose_one(dataclasses.replace(request, limit=request.limit + 5))

    engine = StubEngine(LOGITS, VOCAB, tree=tree)
    with pytest.raises(ValueError, match=f"not a {'tree' if tree else 'chain'} of at most"):
        Runner(engine, drafter=Greedy(lambda context, limit: [0] * limit)).generate([1], SamplingParams(max_tokens=3))
    assert engine.closed == [0] and not engine.caches


# --- drafter, errors, closing


def test_drafter_hears_everything_once():
    (plain,), _, _ = generate(PROMPT, SamplingParams(temperature=0, max_tokens=7))
    wrong = [plain[0], plain[1], (plain[2] + 1) % VOCAB]
    drafter = StubDrafter(lambda context, limit: wrong[:limit] if len(context) == len(PROMPT) else [])
    generate(PROMPT, SamplingParams(temperature=0, max_tokens=5), drafter)
    assert drafter.calls == [
        ("start", 0, tuple(PROMPT)),
        ("observe", 0, tuple(plain[:3]), 2),
        ("observe", 0, (plain[3],), 0),
        ("stop", 0),
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_bad", range(1, 9))
def test_ids_before_a_bad_row_do_not_depend_on_the_draft(temperature, num_bad):
    """The row behind `num_bad` emitted ids is bad: plain or drafted right, exactly these ids come, then the error."""
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=10)
    (whole,), _, _ = generate(PROMPT, params)

    def logits(prefix):
        return LOGITS(prefix) * (np.nan if len(prefix) == len(PROMPT) + num_bad else 1)

    for count in (0, 1, 3, 8):
        drafter = (
            StubDrafter(lambda context, limit: whole[len(context) - len(PROMPT) :][:limit], count) if count else None
        )
        output = Runner(StubEngine(logits, VOCAB), drafter=drafter).generate(PROMPT, params)[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == (whole[:num_bad], "error")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_row_ends_its_request_only(temperature):
    def logits(prefix):
        row = LOGITS(prefix)
        if prefix[0] == 5 and len(prefix) >= 4:
            row[1] = np.nan
        return row

    params = SamplingParams(temperature=temperature, seed=2, max_tokens=10)
    engine = StubEngine(logits, VOCAB)
    outputs = Runner(engine, drafter=ngram()).generate([[1, 2], [5, 1], [2, 2]], params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert len(outputs[1].outputs[0].token_ids) == 2
    assert outputs[1].outputs[0].token_ids == generate([5, 1], params, logits=logits)[0][0]
    assert "not a finite number" in outputs[1].outputs[0].stop_reason
    assert outputs[0].outputs[0].token_ids == generate([1, 2], params)[0][0]
    assert not engine.caches
    with pytest.raises(QuasarError, match="not a finite number"):
        list(Runner(engine).stream([5, 1], params))
    assert not engine.caches


def test_stream_closed_early_frees_its_sequence():
    engine = StubEngine(LOGITS, VOCAB)
    drafter = StubDrafter(lambda context, limit: [])
    runner = Runner(engine, drafter=drafter)
    stream = runner.stream(PROMPT, GREEDY)
    next(stream)
    stream.close()
    assert engine.closed == [0] and drafter.calls[-1] == ("stop", 0)
    runner.stream(PROMPT, GREEDY)  # never iterated: nothing begins
    assert runner.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == plain_decode(PROMPT, GREEDY)
    assert engine.closed == [0, 1] and not engine.caches


def test_engine_failure_frees_all_sequences():
    def logits(prefix):
        if len(prefix) > 8:
            raise RuntimeError("out of memory")
        return LOGITS(prefix)

    engine = StubEngine(logits, VOCAB)
    runner = Runner(engine, max_batch_size=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.generate([[1], [2, 2], [3]], GREEDY)
    assert sorted(engine.closed) == [0, 1] and not engine.caches
    assert runner.generate([1], SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].finish_reason == "length"


def test_streams_advance_together():
    engine = StubEngine(LOGITS, VOCAB)
    runner = Runner(engine)
    params = SamplingParams(temperature=0, max_tokens=4)
    streams = [runner.stream(prompt, params) for prompt in ([1], [2])]
    found = [next(stream).token_ids for stream in streams]
    for stream, ids in reversed(list(zip(streams, found, strict=True))):
        ids += [token for output in stream for token in output.token_ids]
    assert found == [plain_decode([1], params), plain_decode([2], params)]
    assert [len(step.sequences) for step in engine.passes] == [1, 2, 2, 2, 1]
