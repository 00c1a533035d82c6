"""/v1/chat/completions: conversations through the template, answers in the shape of chat."""

from __future__ import annotations

import pytest
from openai import BadRequestError
from server_thread import ChatTokenizer, ServerThread
from stubs import ByteTokenizer, StubDrafter, StubEngine, perfect_rule, random_logits

from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VOCAB = 257
LOGITS = random_logits(VOCAB, seed=6, spread=4.0)
HELLO = [{"role": "user", "content": "hello"}]
PROMPT = "user: hello\nassistant:"


def make_runner() -> Runner:
    return Runner(StubEngine(LOGITS, VOCAB), drafter=StubDrafter(perfect_rule(LOGITS), 3), tokenizer=ByteTokenizer())


def completion(prompt: str = PROMPT, **params):
    return make_runner().generate([prompt], SamplingParams(**params))[0].outputs[0]


@pytest.fixture(scope="module")
def server():
    with ServerThread(make_runner(), ChatTokenizer(), drafter="stub") as server:
        yield server


def test_answer_is_that_of_the_runner_whole_and_streamed(client):
    expected = completion(seed=4, max_tokens=20)
    body = {"model": "tiny", "messages": HELLO, "seed": 4, "max_completion_tokens": 20}
    answer = client.chat.completions.create(**body)
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *pieces, last = chunks
    assert [piece.choices[0].delta.role for piece in pieces[:2]] == ["assistant", None]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text
    assert [piece.choices[0].finish_reason for piece in pieces[-2:]] == [None, expected.finish_reason]
    assert {piece.usage for piece in pieces} == {None}
    assert last.choices == [] and last.usage == answer.usage
    assert last.usage.completion_tokens == len(expected.token_ids)
    assert last.usage.prompt_tokens == len(PROMPT)


def test_without_usage_asked_for_no_chunk_has_it(client):
    for chunk in client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, stream=True):
        assert chunk.usage is None and len(chunk.choices) == 1


def test_answer_may_be_as_long_as_the_context_holds(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"


def test_several_answers_differ_and_are_those_of_the_runner(client):
    expected = make_runner().generate([PROMPT], SamplingParams(seed=4, n=3, max_tokens=8))[0].outputs
    body = {"model": "tiny", "messages": HELLO, "seed": 4, "n": 3, "max_tokens": 8}
    answer = client.chat.completions.create(**body)
    assert [choice.message.content for choice in answer.choices] == [output.text for output in expected]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert texts == [output.text for output in expected]


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_have_the_shape_of_chat(client, streams):
    expected = completion(seed=4, max_tokens=6, logprobs=2)
    body = {"model": "tiny", "messages": HELLO, "seed": 4, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    if streams:
        chunks = client.chat.completions.create(**body, stream=True)
        content = [each for chunk in chunks for each in (chunk.choices[0].logprobs.content)]
    else:
        content = client.chat.completions.create(**body).choices[0].logprobs.content
    assert len(content) == len(expected.token_ids)
    for token, entry, shown in zip(expected.token_ids, expected.logprobs, content, strict=True):
        own = entry[token]
        assert (shown.token, shown.logprob) == (own.decoded_token, own.logprob)
        whole = "\ufffd" not in own.decoded_token
        assert shown.bytes == (list(own.decoded_token.encode()) if whole else None)
        ranked = sorted((each for each in entry.values() if each.rank <= 2), key=lambda each: each.rank)
        assert [(top.token, top.logprob) for top in shown.top_logprobs] == [
            (each.decoded_token, each.logprob) for each in ranked
        ]


def test_logprobs_alone_have_no_alternatives(client):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, logprobs=True)
    assert [each.top_logprobs for each in answer.choices[0].logprobs.content] == [[], []]


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        ([{"role": "system", "content": "be kind"}, *HELLO], {}, f"system: be kind\n{PROMPT}"),
        ([{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}], {},
         "user: hel\nlo\nassistant:"),
        (HELLO, {"add_generation_prompt": False}, "user: hello"),
        (HELLO, {"continue_final_message": True}, "user: hello"),
        (HELLO, {"chat_template_kwargs": {"mood": "good"}}, "user: hello\nmood is good\nassistant:"),
        ([{"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None}, *HELLO], {},
         f"assistant: hi\n{PROMPT}"),
    ],
)  # fmt: skip
def test_template_sees_the_conversation(client, messages, options, prompt):
    answer = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=7, extra_body=options
    )
    expected = completion(prompt, temperature=0, max_tokens=7)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == len(prompt)


def test_template_of_another_is_refused(client):
    with pytest.raises(BadRequestError, match="cannot be given 'conversation'"):
        client.chat.completions.create(
            model="tiny", messages=HELLO, extra_body={"chat_template_kwargs": {"conversation": []}}
        )


def test_model_without_a_template_says_so():
    with ServerThread(make_runner(), WithoutTemplate()) as server:
        status, error = server.refusal("/v1/chat/completions", {"messages": HELLO})
    assert status == 400 and "no chat template" in error["message"]


class WithoutTemplate(ByteTokenizer):
    chat_template = None


def test_tokenize_and_detokenize(server):
    assert server.request("/tokenize", {"prompt": "héllo"})[2] == {
        "tokens": list("héllo".encode()),
        "count": 6,
        "max_model_len": 256,
    }
    assert server.request("/tokenize", {"messages": HELLO})[2]["tokens"] == list(PROMPT.encode())
    assert server.request("/detokenize", {"tokens": [104, 105, 256]})[2] == {"prompt": "hi<end>"}
    assert server.refusal("/detokenize", {"tokens": [257]})[1]["param"] == "tokens"
    assert server.refusal("/tokenize", {})[0] == 400
