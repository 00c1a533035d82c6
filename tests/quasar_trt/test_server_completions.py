"""/v1/completions: the answers are the runner's own, whole and streamed, with every parameter."""

from __future__ import annotations

import pytest
from openai import OpenAI
from server_thread import ServerThread
from stubs import ByteTokenizer, StubDrafter, StubEngine, chain_logits, perfect_rule, random_logits

from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VOCAB = 257
LOGITS = random_logits(VOCAB, seed=5, spread=4.0)
PATH = "/v1/completions"


def make_runner(logits=LOGITS, num_draft_tokens: int = 3, drafts=None, **options) -> Runner:
    engine_options = {name: options.pop(name) for name in ("max_seq_len",) if name in options}
    drafter = StubDrafter(drafts or perfect_rule(logits), num_draft_tokens)
    return Runner(StubEngine(logits, VOCAB, **engine_options), drafter=drafter, tokenizer=ByteTokenizer(), **options)


@pytest.fixture(scope="module")
def server():
    with ServerThread(make_runner(), ByteTokenizer(), drafter="stub") as server:
        yield server


def collect(client: OpenAI, **body) -> tuple[dict[int, dict], object]:
    """What the pieces of a stream join to, per choice, and the usage."""
    choices: dict[int, dict] = {}
    usage = None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **body):
        assert usage is None, "nothing comes after the usage"
        usage = chunk.usage
        for piece in chunk.choices:
            choice = choices.setdefault(piece.index, {"text": "", "token_ids": [], "reason": None, "logprobs": []})
            assert choice["reason"] is None, "nothing comes after the end of a choice"
            choice["text"] += piece.text
            choice["token_ids"] += getattr(piece, "token_ids", [])
            choice["reason"] = piece.finish_reason
            choice["logprobs"] += piece.logprobs.token_logprobs if piece.logprobs else []
    return choices, usage


PARAMETERS = [
    {},
    {"temperature": 0.0, "max_tokens": 9},
    {"temperature": 1.3, "top_p": 0.8, "seed": 11, "n": 3},
    {"top_k": 5, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"min_p": 0.1, "seed": -2, "min_tokens": 4, "ignore_eos": True},
    {"logit_bias": {"65": 8.0, "66": -100.0}, "seed": 3},
    {"allowed_token_ids": [65, 66, 67], "seed": 4, "stop": ["AB", "CC"]},
    {"allowed_token_ids": [65, 66, 67], "seed": 4, "stop": "AB", "include_stop_str_in_output": True},
    {"allowed_token_ids": [65, 66, 67], "seed": 4, "bad_words": ["AB"], "stop_token_ids": [67]},
    {"allowed_token_ids": [65, 256], "seed": 5, "skip_special_tokens": False, "ignore_eos": True},
    {"seed": 6, "logprobs": 3},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda each: "+".join(each) or "none")
@pytest.mark.parametrize("drafter", ["stub", "none"])
def test_answers_are_those_of_the_runner(server, client, parameters, drafter):
    given = {"seed": 8} | parameters
    (expected,) = make_runner().generate(["a prompt"], SamplingParams(**given))
    own = {name: given.pop(name) for name in list(given) if name in OPENAI}
    body = own | {"model": "tiny", "prompt": "a prompt"}
    body["extra_body"] = given | {"return_token_ids": True, "drafter": drafter}
    answer = client.completions.create(**body)
    streamed, usage = collect(client, **body)
    assert len(answer.choices) == len(streamed) == len(expected.outputs)
    for choice, output in zip(answer.choices, expected.outputs, strict=True):
        piece = streamed[output.index]
        assert choice.index == output.index
        assert choice.text == piece["text"] == output.text
        assert choice.token_ids == piece["token_ids"] == output.token_ids
        assert choice.finish_reason == piece["reason"] == output.finish_reason
        assert choice.stop_reason == output.stop_reason
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        assert (
            logprobs
            == piece["logprobs"]
            == [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs or (), strict=False)]
        )
    emitted = sum(len(output.token_ids) for output in expected.outputs)
    for counts in (answer.usage, usage):
        assert (counts.prompt_tokens, counts.completion_tokens, counts.total_tokens) == (8, emitted, 8 + emitted)
        assert bool(counts.speculation["num_draft_tokens"]) == (drafter == "stub")


OPENAI = {
    "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed",
    "stop", "temperature", "top_p",
}  # fmt: skip


def test_prompts_may_be_several_and_token_ids(server, client):
    prompts = [[1, 2, 3], [4, 5]]
    params = SamplingParams(seed=3, n=2, max_tokens=6)
    expected = [output for answer in make_runner().generate(prompts, params) for output in answer.outputs]
    body = {"model": "tiny", "prompt": prompts, "seed": 3, "n": 2, "max_tokens": 6}
    answer = client.completions.create(**body)
    streamed, usage = collect(client, **body)
    assert [choice.index for choice in answer.choices] == sorted(streamed) == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]
    assert [streamed[index]["text"] for index in range(4)] == [output.text for output in expected]
    assert answer.usage.prompt_tokens == usage.prompt_tokens == 5
    texts = client.completions.create(model="tiny", prompt=["ab", "c"], seed=3)
    assert [choice.text for choice in texts.choices] == [
        answer.outputs[0].text for answer in make_runner().generate(["ab", "c"], SamplingParams(seed=3))
    ]


def test_logprobs_have_the_shape_of_completions(client):
    (expected,) = make_runner().generate(["ab"], SamplingParams(seed=3, max_tokens=5, logprobs=2))
    choice = client.completions.create(model="tiny", prompt="ab", seed=3, max_tokens=5, logprobs=2).choices[0]
    (output,) = expected.outputs
    assert choice.logprobs.tokens == [
        entry[token].decoded_token for token, entry in zip(output.token_ids, output.logprobs, strict=True)
    ]
    for token, entry, top in zip(output.token_ids, output.logprobs, choice.logprobs.top_logprobs, strict=True):
        assert top.get(entry[token].decoded_token) is not None
        assert set(top.values()) <= {each.logprob for each in entry.values()}
    assert choice.logprobs.text_offset[0] == 0
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)


def test_text_offsets_are_where_the_tokens_begin(client):
    body = {"model": "tiny", "prompt": "ab", "seed": 3, "max_tokens": 8, "logprobs": 0}
    choice = client.completions.create(**body, extra_body={"allowed_token_ids": [97, 98, 99]}).choices[0]
    assert choice.logprobs.text_offset == list(range(8))
    assert choice.logprobs.tokens == list(choice.text)


def test_echo_repeats_the_prompt_with_its_logprobs(client):
    expected = make_runner().generate(["abc"], SamplingParams(seed=3, max_tokens=2, logprobs=1, prompt_logprobs=1))[0]
    body = {"model": "tiny", "prompt": "abc", "seed": 3, "max_tokens": 2, "echo": True}
    choice = client.completions.create(**body, logprobs=1).choices[0]
    assert choice.text == "abc" + expected.outputs[0].text
    assert choice.logprobs.tokens[:3] == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [
        None,
        expected.prompt_logprobs[1][ord("b")].logprob,
        expected.prompt_logprobs[2][ord("c")].logprob,
        *(next(iter(entry.values())).logprob for entry in expected.outputs[0].logprobs),
    ]
    assert choice.logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert choice.logprobs.top_logprobs[0] is None and len(choice.logprobs.top_logprobs) == 5
    streamed, _ = collect(client, **body)
    assert streamed[0]["text"] == choice.text
    assert client.completions.create(**body | {"prompt": [97, 98, 99]}).choices[0].text == choice.text


def test_prompt_logprobs_have_the_shape_of_vllm(client):
    (expected,) = make_runner().generate(["abc"], SamplingParams(seed=3, max_tokens=1, prompt_logprobs=2))
    body = {"model": "tiny", "prompt": "abc", "seed": 3, "max_tokens": 1}
    first, *rest = client.completions.create(**body, extra_body={"prompt_logprobs": 2}).choices[0].prompt_logprobs
    assert first is None
    assert rest == [
        {
            str(token): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in entry.items()
        }
        for entry in expected.prompt_logprobs[1:]
    ]


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 13])
def test_stop_text_ends_text_ids_and_logprobs_together(included, num_draft_tokens):
    chain = list(b"xxENDyyyyyyyy")
    logits = chain_logits(chain, num_prompt_tokens=2, vocab=VOCAB)
    body = {
        "prompt": "ab",
        "stop": ["END"],
        "temperature": 0,
        "max_tokens": 13,
        "logprobs": 1,
        "return_token_ids": True,
    }
    body["include_stop_str_in_output"] = included
    with ServerThread(
        make_runner(logits, num_draft_tokens, max_draft_len=16), ByteTokenizer(), drafter="stub"
    ) as server:
        _, _, answer = server.request(PATH, body)
        _, _, events = server.request(PATH, body | {"stream": True})
    choice = answer["choices"][0]
    assert choice["text"] == ("xxEND" if included else "xx")
    assert choice["token_ids"] == chain[:5] and choice["logprobs"]["tokens"] == list("xxEND")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
    assert answer["usage"]["completion_tokens"] == 5
    assert b"yy" not in events and events.endswith(b"data: [DONE]\n\n")
    assert included or b'"text":"E' not in events


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("drafter", ["stub", "none"])
def test_max_tokens_is_met_exactly(server, max_tokens, drafter):
    body = {"prompt": "ab", "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, "drafter": drafter}
    _, _, answer = server.request(PATH, body | {"return_token_ids": True})
    choice = answer["choices"][0]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"


def test_context_limit_ends_a_completion_and_refuses_a_prompt():
    with ServerThread(make_runner(num_draft_tokens=5, max_seq_len=16), ByteTokenizer(), drafter="stub") as server:
        body = {"temperature": 0, "ignore_eos": True, "max_tokens": 100}
        _, _, answer = server.request(PATH, body | {"prompt": [1] * 13})
        assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["finish_reason"] == "length"
        status, error = server.refusal(PATH, body | {"prompt": [1] * 16})
        assert status == 400 and error["param"] == "prompt" and "16 tokens; allowed: at most 15" in error["message"]


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_characters_of_several_tokens_come_whole(num_draft_tokens):
    chain = [*"é世🙂".encode(), 256]
    runner = make_runner(chain_logits(chain, 1, VOCAB), num_draft_tokens)
    with ServerThread(runner, ByteTokenizer(), drafter="stub") as server, server.client() as client:
        body = {"model": "tiny", "prompt": "a", "temperature": 0, "max_tokens": 32}
        pieces = [chunk.choices[0] for chunk in client.completions.create(**body, stream=True)]
        assert "".join(piece.text for piece in pieces) == "é世🙂"
        assert not any("\ufffd" in piece.text for piece in pieces)
        assert pieces[-1].finish_reason == "stop"
        cut = client.completions.create(**body | {"max_tokens": 7})
        assert cut.choices[0].text == "é世\ufffd" and cut.usage.completion_tokens == 7


def test_any_end_of_sequence_id_ends_in_the_middle_of_a_run():
    runner = make_runner(chain_logits([4, 5, 7, 9, 9], 1, VOCAB), 4, eos_token_ids=[2, 7])
    with ServerThread(runner, ByteTokenizer(), drafter="stub") as server:
        body = {"prompt": [1], "temperature": 0, "max_tokens": 6, "return_token_ids": True}
        _, _, answer = server.request(PATH, body)
        choice = answer["choices"][0]
        assert choice["token_ids"] == [4, 5, 7] and choice["text"] == "\x04\x05"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 7)
        _, _, answer = server.request(PATH, body | {"ignore_eos": True})
        assert answer["choices"][0]["token_ids"] == [4, 5, 7, 9, 9, 9]
        assert answer["choices"][0]["finish_reason"] == "length"


def test_origins_tell_accepted_recovered_bonus_and_plain_tokens():
    chain = list(b"abcdefghij")
    drafts = iter([[97, 98], [100, 33, 33], [], [103, 104]])
    runner = make_runner(chain_logits(chain, 1, VOCAB), drafts=lambda context, limit: next(drafts, []))
    with ServerThread(runner, ByteTokenizer(), drafter="stub") as server:
        body = {"prompt": "a", "temperature": 0, "max_tokens": 9, "return_token_ids": True}
        _, _, answer = server.request(PATH, body)
        _, _, plain = server.request(PATH, body | {"drafter": "none"})
    choice = answer["choices"][0]
    assert choice["text"] == "abcdefghi" and choice["text_offsets"] == list(range(9))
    assert choice["token_origins"] == [
        *("accepted", "accepted", "bonus", "accepted", "recovered", "plain", "accepted", "accepted", "bonus")
    ]
    assert answer["usage"]["speculation"] == {
        "num_verify_steps": 4,
        "num_drafts": 3,
        "num_draft_tokens": 7,
        "num_accepted_tokens": 5,
        "acceptance_rate": 5 / 7,
        "mean_acceptance_length": 9 / 4,
    }
    assert plain["choices"][0]["token_origins"] == ["plain"] * 9
    assert plain["usage"]["speculation"]["acceptance_rate"] == 0.0


def test_model_defaults_fill_in_what_is_not_given():
    own = {"temperature": 0.0, "max_tokens": 3}
    with ServerThread(make_runner(), ByteTokenizer(), sampling=own, drafter="stub") as server:
        _, _, first = server.request(PATH, {"prompt": "ab"})
        _, _, second = server.request(PATH, {"prompt": "ab", "max_tokens": None, "temperature": 0.7, "seed": 1})
    assert first["choices"][0]["text"] == make_runner().generate("ab", SamplingParams(**own))[0].outputs[0].text
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=3)
    assert second["choices"][0]["text"] == make_runner().generate("ab", params)[0].outputs[0].text
