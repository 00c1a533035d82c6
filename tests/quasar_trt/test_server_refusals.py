"""What is not in order is refused with OpenAI's error, its status and the parameter's name; nothing is ignored."""

from __future__ import annotations

import json

import pytest
from server_thread import ChatTokenizer, ServerThread
from stubs import ByteTokenizer, StubEngine, random_logits

from quasar_trt.runner import Runner
from quasar_trt.server.protocol import ChatRequest, CompletionRequest

VOCAB = 257
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def make_runner(**options) -> Runner:
    return Runner(StubEngine(random_logits(VOCAB), VOCAB), tokenizer=ByteTokenizer(), **options)


@pytest.fixture(scope="module")
def server():
    with ServerThread(make_runner(), ChatTokenizer(), max_body_bytes=20_000) as server:
        yield server


@pytest.fixture(autouse=True)
def _server_goes_on(request):
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        assert server.request(COMPLETIONS, {"prompt": "ab", "max_tokens": 2})[0] == 200
        assert server.runner.load.num_running == server.runner.load.num_waiting == 0


WRONG = [
    # parameter, value, what the message says
    ("temperature", -1, "temperature is -1.0; allowed: 0 (greedy) or more"),
    ("temperature", "hot", "temperature is 'hot'; allowed: a number"),
    ("temperature", True, "temperature is True; allowed: a number"),
    ("top_p", 0, "top_p is 0.0; allowed"),
    ("top_k", 1.5, "top_k is 1.5; allowed: an integer"),
    ("n", 0, "n is 0; allowed"),
    ("n", 129, "n is 129; allowed: 128 or less"),
    ("max_tokens", 0, "max_tokens is 0; allowed"),
    ("min_tokens", 99, "min_tokens is 99; allowed: at most max_tokens"),
    ("seed", 2**63, "seed is 9223372036854775808; allowed: a 64-bit integer"),
    ("presence_penalty", 3, "presence_penalty is 3.0; allowed: -2 to 2"),
    ("repetition_penalty", 0, "repetition_penalty is 0.0"),
    ("logit_bias", {"999": 1}, "logit_bias has token id 999; allowed: 0 to 256"),
    ("logit_bias", {"x": 1}, "logit_bias is {'x': 1.0}; allowed: a mapping of token ids"),
    ("logit_bias", [1], "logit_bias is [1]; allowed: an object"),
    ("stop", "", "stop is ''; allowed: a text that is not empty"),
    ("stop", 5, "stop is 5; allowed: text or a list"),
    ("stop", ["x"] * 65, "; allowed: text or at most 64 of them"),
    ("stop", "x" * 257, "stop has a text of more than 256 characters"),
    ("bad_words", [""], "bad_words is ['']; allowed"),
    ("stop_token_ids", [300], "stop_token_ids has token id 300; allowed: 0 to 256"),
    ("allowed_token_ids", [], "allowed_token_ids is []; allowed: a list of at least one"),
    ("prompt_logprobs", 21, "prompt_logprobs is 21; allowed: 20 or less"),
    ("drafter", "eagle", "drafter is 'eagle'; allowed: 'none'"),
    ("stream_options", {"include_usage": True}, "stream_options is given without stream"),
    ("temprature", 1, "unknown parameter 'temprature'; one of: "),
    ("tools", [], "tools is not supported by this server; leave it out"),
    ("response_format", {"type": "json_object"}, "response_format is not supported"),
    ("best_of", 2, "best_of is not supported"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[f"{name}={value!r:.12}" for name, value, _ in WRONG])
@pytest.mark.parametrize("streams", [False, True])
def test_parameter_is_refused_by_name(server, name, value, message, streams):
    for path, body in ((COMPLETIONS, {"prompt": "ab"}), (CHAT, {"messages": HELLO, "max_tokens": 16})):
        status, error = server.refusal(path, body | {"stream": streams} | {name: value} | _unstreamed(name, streams))
        assert status == 400 and error["type"] == "invalid_request_error"
        assert error["param"] == name and message in error["message"], error


def _unstreamed(name: str, streams: bool) -> dict:
    return {"stream": False} if name in ("stream_options", "prompt_logprobs") and streams else {}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 999]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1], "echo": True}, "prompt"),
        (COMPLETIONS, {"prompt": "\ud800"}, None),
        (COMPLETIONS, {"prompt": "x" * 300}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "\ud800": 1}, "\\ud800"),
        (COMPLETIONS, {"prompt": [[1], [1] * 300]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [1] * 300], "stream": True}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 100}, "n"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "temperature": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"\ud800": 1}}, "logit_bias"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"\ud800": 1}}, None),
        (CHAT, {"messages": [{"role": "\ud800", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "frob", "content": "x"}]}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options"),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages"),
        (CHAT, {"messages": HELLO, "logprobs": 2}, "logprobs"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ],
)
def test_body_is_refused_by_what_is_wrong_in_it(server, path, body, param):
    status, error = server.refusal(path, json.dumps(body).encode())
    assert status == 400 and error["param"] == param, error
    assert "\n" not in error["message"] and len(error["message"]) < 2000


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {}, "prompt is missing; give it"),
        (COMPLETIONS, {"prompt": 5}, "prompt is 5; allowed: text or a list"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1] is 'a'; allowed: an integer"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt[1] is 1; allowed: text"),
        (COMPLETIONS, {"prompt": [[1, 0.5]]}, "prompt[0][1] is 0.5; allowed: an integer"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias.1 is 'x'; allowed: a number"),
        (COMPLETIONS, {"prompt": "a", "stream": 1}, "stream is 1; allowed: true or false"),
        (COMPLETIONS, {"prompt": "a", "user": "x" * 257}, "; allowed: text of at most 256 characters"),
        (CHAT, {"messages": []}, "messages is []; allowed: at least 1 of them"),
        (CHAT, {"messages": [5]}, "messages[0] is 5; allowed: an object"),
        (CHAT, {"messages": [*HELLO, {"role": "user"}]}, "messages[1].content is missing; give it"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5; allowed: text or a list"),
        (CHAT, {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type is missing; give it"),
        (CHAT, {"messages": [HELLO[0] | {"tool_calls": []}]}, "messages[0].tool_calls is []; allowed: null"),
        (CHAT, {"messages": HELLO, "stream_options": "all"}, "stream_options is 'all'; allowed: an object"),
    ],
)
def test_value_of_another_kind_is_shown_where_it_is_with_what_is_allowed(server, path, body, message):
    status, error = server.refusal(path, body)
    assert status == 400 and error["message"].endswith(message), error


def test_role_is_refused_by_name_with_those_allowed(server):
    for path in (CHAT, "/tokenize"):
        _, error = server.refusal(path, {"messages": [*HELLO, {"role": "frob", "content": "x"}]})
        assert error["message"] == "messages has role 'frob'; allowed: system, developer, user, assistant, tool"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is None; allowed: a JSON object, sent as Content-Type: application/json"),
        (b"{", "the body is no JSON"),
        (b'{"prompt": "a", }', "the body is no JSON"),
        (b'{"prompt": "\xff\xfe"}', "the body is no JSON"),
        (b"[" * 10_000, "the body is no JSON"),
        (b'"text"', "the body is 'text'; allowed: a JSON object"),
        (b"[1, 2]", "the body is [1, 2]; allowed: a JSON object"),
        (b"null", "the body is None; allowed: a JSON object"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is no JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature is nan"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf"),
        (b'{"prompt": "a", ' + b", ".join(b'"k%d": 1' % n for n in range(1500)) + b"}", "unknown parameter 'k0'"),
    ],
)
def test_malformed_body_is_refused(server, body, message):
    status, error = server.refusal(COMPLETIONS, body)
    assert status == 400 and message in error["message"]


def test_body_that_is_not_declared_as_json_is_refused(server):
    status, error = server.refusal(COMPLETIONS, b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert status == 400 and "Content-Type: application/json" in error["message"]


def test_body_without_a_type_is_refused(server):
    # A page of another origin could have a browser send it.
    with server.connect() as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n" + b'{"prompt": "a"}')
        assert client.recv(65536).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("size", [20_001, 200_000])
def test_body_beyond_the_limit_is_refused(server, size):
    status, error = server.refusal(COMPLETIONS, b" " * size)
    assert status == 413 and "more than 20000 bytes" in error["message"]


def test_other_paths_methods_and_models_are_refused(server):
    status, error = server.refusal("/v1/embeddings", {"input": "a"})
    assert status == 404 and error["message"] == (
        "there is no POST '/v1/embeddings'; GET /openapi.json tells what there is"
    )
    status, headers, answer = server.request(COMPLETIONS)
    assert (status, headers["Allow"]) == (405, "POST")
    assert answer["error"]["message"].startswith("there is no GET '/v1/completions'; ")
    assert "\n" not in server.refusal("/a%0Ab", None)[1]["message"]
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})):
        status, error = server.refusal(path, body | {"model": "other"})
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert error["message"] == "model is 'other'; allowed: 'tiny'"
    assert server.refusal("/v1/models/other", None)[0] == 404
    assert server.request("/v1/models/tiny")[2]["max_model_len"] == 256


def test_api_key_is_asked_for():
    with ServerThread(make_runner(), api_key="secret") as server:
        body = {"prompt": [1], "max_tokens": 2}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "é"}):
            status, error = server.refusal(COMPLETIONS, body, headers=headers)
            assert (status, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
            assert server.refusal("/v1/models", None, headers=headers)[0] == 401
        assert server.request(COMPLETIONS, body, headers={"Authorization": "Bearer secret"})[0] == 200
        for path in ("/", "/page/page.js", "/health", "/version", "/metrics"):
            assert server.request(path)[0] == 200


def test_row_that_is_no_distribution_is_the_server_s_fault():
    import numpy as np

    rows = {1: np.zeros(VOCAB, np.float32)}
    runner = Runner(StubEngine(lambda prefix: rows.get(len(prefix), np.full(VOCAB, np.nan, np.float32)), VOCAB))
    with ServerThread(runner) as server:
        status, error = server.refusal(COMPLETIONS, {"prompt": [1]})
        assert status == 500 and error["type"] == "server_error" and "not a finite number" in error["message"]
        status, _, events = server.request(COMPLETIONS, {"prompt": [1], "stream": True})
        *_, failure, done, rest = events.split(b"\n\n")
        assert status == 200 and (done, rest) == (b"data: [DONE]", b"")
        assert "not a finite number" in json.loads(failure.removeprefix(b"data: "))["error"]["message"]


def test_engine_without_a_tokenizer_takes_and_gives_ids():
    with ServerThread(Runner(StubEngine(random_logits(VOCAB), VOCAB))) as server:
        _, _, answer = server.request(COMPLETIONS, {"prompt": [1], "temperature": 0, "return_token_ids": True})
        assert len(answer["choices"][0]["token_ids"]) == 16 and answer["choices"][0]["text"] == ""
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})):
            assert "no tokenizer" in server.refusal(path, body)[1]["message"]


def test_every_sampling_parameter_can_be_asked_for():
    import dataclasses

    from quasar_trt.sampling_params import SamplingParams

    names = {field.name for field in dataclasses.fields(SamplingParams)} - {"logits_processors"}
    assert names <= set(CompletionRequest.model_fields) and names <= set(ChatRequest.model_fields)
