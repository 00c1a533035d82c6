"""Clients that go away, do not read, send too slowly or are too many; and the orderly end of the server."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import numpy as np
import pytest
from server_thread import ServerThread
from stubs import ByteTokenizer, GatedEngine, random_logits

from quasar_trt.prefix_cache import PrefixCache
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.server import body as body_module
from quasar_trt.server import connection as connection_module
from quasar_trt.server import run as run_module
from quasar_trt.server.text import Text

VOCAB = 257
LOGITS = random_logits(VOCAB, seed=3, spread=4.0)
PATH = "/v1/completions"
SHORT = {"prompt": [1], "temperature": 0, "max_tokens": 3, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 200}


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch):
    """So that empty caches mean that every request has given back what it held."""
    monkeypatch.setattr(PrefixCache, "min_length", 100_000)


def make_runner(**options) -> Runner:
    engine = GatedEngine(LOGITS, VOCAB, max_seq_len=options.pop("max_seq_len", 256))
    return Runner(engine, tokenizer=ByteTokenizer(), **options)


def post(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def eventually(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answers(server: ServerThread) -> bool:
    status, _, answer = server.request(PATH, SHORT)
    return status == 200 and answer["usage"]["completion_tokens"] == 3


def in_thread(call, *args) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(call(*args)))
    thread.start()
    return thread, results


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_client_that_goes_away_frees_its_rows(streams, waiting):
    runner = make_runner(max_batch_size=1 if waiting else 4)
    with ServerThread(runner) as server:
        runner.engine.gate.clear()
        other, results = in_thread(server.request, PATH, LONG | {"prompt": [2]})
        eventually(lambda: runner.load.num_running or runner.load.num_waiting)
        client = server.connect()
        client.sendall(post(PATH, LONG | {"stream": streams}))
        eventually(lambda: len(server.server._backend.runner._open) == 2)
        client.close()
        runner.engine.gate.set()
        other.join()
        eventually(lambda: runner.service.num_finished == 2)
        assert results[0][2]["usage"]["completion_tokens"] == 200
        assert runner.stats.num_emitted_tokens < 400 and not runner.engine.caches
        assert answers(server)


def test_client_that_goes_away_in_the_middle_of_a_stream():
    runner = make_runner(max_seq_len=100_000)
    with ServerThread(runner) as server:
        client = server.connect()
        client.sendall(post(PATH, LONG | {"stream": True, "max_tokens": 50_000}))
        client.recv(100)
        client.close()
        eventually(lambda: runner.service.num_finished == 1)
        assert runner.stats.num_emitted_tokens < 50_000 and not runner.engine.caches


def test_too_many_requests_are_told_to_come_again():
    runner = make_runner()
    with ServerThread(runner, max_requests=2) as server:
        runner.engine.gate.clear()
        first, _ = in_thread(server.request, PATH, SHORT | {"prompt": [[1], [2]]})
        eventually(lambda: len(server.server._backend.runner._open) == 2)
        for streams in (False, True):
            status, headers, answer = server.request(PATH, SHORT | {"stream": streams})
            assert status == 429 and headers["Retry-After"] == "1"
            assert answer["error"]["type"] == "rate_limit_error" and "2 requests are open" in answer["error"]["message"]
        status, error = server.refusal(PATH, SHORT | {"prompt": [[1], [2], [3]]})
        assert status == 400 and "3 completions are asked for; allowed: 2" in error["message"]
        runner.engine.gate.set()
        first.join()
        assert answers(server)


def test_refused_prompts_are_not_tokenized(monkeypatch):
    monkeypatch.setattr(Text, "encode", None)
    runner = make_runner()
    with ServerThread(runner, max_requests=1) as server:
        assert server.refusal(PATH, SHORT | {"prompt": ["a", "b"]})[0] == 400
        runner.engine.gate.clear()
        first, _ = in_thread(server.request, PATH, SHORT)
        eventually(lambda: server.server._backend.runner._open)
        assert server.refusal(PATH, SHORT | {"prompt": "a"})[0] == 429
        runner.engine.gate.set()
        first.join()


def test_request_ends_when_its_time_is_over():
    runner = make_runner()
    with ServerThread(runner, request_timeout=0.05) as server:
        runner.engine.gate.clear()
        thread, results = in_thread(server.request, PATH, LONG)
        time.sleep(0.1)
        runner.engine.gate.set()
        thread.join()
        status, _, answer = results[0]
        assert status == 200 and answer["choices"][0]["finish_reason"] == "timeout"
        assert answer["usage"]["completion_tokens"] < 200


def test_slow_reader_holds_up_nobody_and_is_cut_off(monkeypatch):
    monkeypatch.setattr(connection_module, "STALL_SECONDS", 0.3)
    row = np.zeros(VOCAB, np.float32)
    runner = Runner(GatedEngine(lambda prefix: row, VOCAB, max_seq_len=100_000), tokenizer=ByteTokenizer())
    with ServerThread(runner) as server:
        client = server.connect()
        client.sendall(post(PATH, LONG | {"stream": True, "max_tokens": 99_000, "logprobs": 20}))
        eventually(lambda: runner.load.num_running)
        assert answers(server)
        eventually(lambda: runner.load.num_running == 0, 30)
        assert runner.stats.num_emitted_tokens < 99_000 and not runner.engine.caches
        client.close()


def test_slow_reader_that_reads_on_gets_a_long_answer_whole(monkeypatch):
    monkeypatch.setattr(connection_module, "STALL_SECONDS", 2)
    with ServerThread(make_runner(), ByteTokenizer(), max_body_bytes=10_000_000) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        client.settimeout(30)
        client.connect((server.host, server.port))
        client.sendall(post("/tokenize", {"prompt": "a" * 3_000_000}))
        data = b""
        while not data.endswith(b"}"):
            part = client.recv(2**16)
            assert part
            data += part
            time.sleep(0.02)
        client.close()
        assert data.count(b"97") > 3_000_000 - 10 and answers(server)


def test_head_that_does_not_come_to_its_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(connection_module, "HEAD_SECONDS", 0.2)
    with ServerThread(make_runner()) as server:
        fresh, used = server.connect(), server.connect()
        used.sendall(post(PATH, SHORT))
        assert used.recv(65536).startswith(b"HTTP/1.1 200")
        for client in (fresh, used):
            with pytest.raises((ConnectionError, TimeoutError)):
                for byte in b"POST /v1/completions HTTP/1.1\r\nHost: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx":
                    client.sendall(bytes([byte]))
                    time.sleep(0.02)
                assert client.recv(100)
                raise AssertionError("the connection is still open")
            client.close()
        assert answers(server)


def test_rest_of_a_refused_request_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(connection_module, "HEAD_SECONDS", 0.2)
    with ServerThread(make_runner()) as server:
        client = server.connect()
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 404")
        with pytest.raises(ConnectionError):
            for _ in range(200):
                client.sendall(b" ")
                time.sleep(0.02)
        client.close()
        assert answers(server)


def test_body_that_does_not_come_to_its_end_is_refused(monkeypatch):
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.2)
    with ServerThread(make_runner()) as server:
        client = server.connect()
        client.sendall(post(PATH, SHORT)[:-5])
        answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408") and b"did not come within" in answer
        client.close()
        assert answers(server)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 100) for n in range(2000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\r\n\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["headers", "header", "tls", "length", "chunk", "lines", "target", "path"],
)
def test_what_is_no_request_leaves_the_server_as_it_is(server, data):
    client = server.connect()
    client.settimeout(0.5)
    try:
        client.sendall(data)
        answer = client.recv(65536)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    except (ConnectionError, TimeoutError):
        pass
    client.close()
    assert answers(server)


@pytest.fixture(scope="module")
def server():
    with ServerThread(make_runner()) as server:
        yield server


def whole_answer(client: socket.socket) -> tuple[bytes, dict]:
    """Head and JSON of what comes until the connection is closed."""
    head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
    return head.lower(), json.loads(body)


def test_malformed_request_is_told_so_and_leaves_no_trace_in_the_log(server, caplog):
    with server.connect() as client:
        client.sendall(b"\x16\x03\x01\x02\r\n\r\n")
        head, answer = whole_answer(client)
    assert head.startswith(b"http/1.1 400") and b"content-type: application/json" in head
    error = answer["error"]
    assert error.pop("message").startswith("the request is malformed HTTP, or its head is too large; allowed: HTTP/1.1")
    assert error == {"type": "invalid_request_error", "param": None, "code": None}
    assert answers(server) and not [each for each in caplog.records if each.exc_info]


def test_malformed_rest_of_a_refused_request_ends_the_connection(server, caplog):
    with server.connect() as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        data = b""
        while not data.endswith(b"}}"):
            data += client.recv(65536)
        assert data.startswith(b"HTTP/1.1 404")
        client.sendall(b"no chunk\r\n")
        with contextlib.suppress(ConnectionError):
            assert client.recv(65536) == b""
    assert answers(server) and not [each for each in caplog.records if each.exc_info]


def test_connections_beyond_the_limit_are_told_so_and_the_others_go_on(server, monkeypatch):
    with contextlib.closing(http.client.HTTPConnection(server.host, server.port, timeout=30)) as first:
        first.request("GET", "/health")
        assert first.getresponse().read()
        monkeypatch.setattr(connection_module, "MAX_CONNECTIONS", 1)
        status, headers, answer = server.request(PATH, SHORT)
        assert status == 503 and headers["Connection"] == "close"
        assert answer["error"]["type"] == "service_unavailable_error"
        assert answer["error"]["message"].startswith("1 connections are open already; close some")
        first.request("GET", "/health")
        assert first.getresponse().status == 200
    eventually(lambda: answers(server))


def test_requests_follow_each_other_on_one_connection(server):
    client = server.connect()
    client.sendall(post(PATH, SHORT) * 3)
    client.settimeout(5)
    data = b""
    while data.count(b"HTTP/1.1 200") < 3 or not data.endswith(b"}"):
        data += client.recv(65536)
    assert data.count(b'"completion_tokens":3') == 3
    client.close()


def test_stopping_lets_running_requests_end_and_turns_new_ones_away():
    runner = make_runner()
    server = ServerThread(runner)
    runner.engine.gate.clear()
    requests = [in_thread(server.request, PATH, LONG | {"stream": streams}) for streams in (False, True)]
    eventually(lambda: len(server.server._backend.runner._open) == 2)
    assert server.request("/health")[0] == 200
    server.signal()
    eventually(lambda: server.server._backend.draining)
    status, headers, answer = server.request(PATH, SHORT)
    assert status == 503 and headers["Connection"] == "close"
    assert answer["error"]["type"] == "service_unavailable_error"
    assert server.request("/health")[0] == 503
    runner.engine.gate.set()
    server.join()
    assert server.failure is None
    (_, [(_, _, whole)]), (_, [(_, _, events)]) = requests
    assert whole["usage"]["completion_tokens"] == 200
    assert events.endswith(b"data: [DONE]\n\n")
    with pytest.raises(ConnectionError):
        server.connect()


def test_second_signal_aborts_what_runs():
    runner = make_runner(max_seq_len=1_000_000)
    server = ServerThread(runner)
    thread, results = in_thread(server.request, PATH, LONG | {"max_tokens": 900_000})
    eventually(lambda: runner.load.num_running)
    server.signal()
    server.signal()
    server.join()
    thread.join()
    assert results[0][2]["choices"][0]["finish_reason"] == "abort"


def test_pass_that_does_not_end_is_left_behind(monkeypatch):
    monkeypatch.setattr(run_module, "_ABORT_SECONDS", 0.2)
    runner = make_runner()
    server = ServerThread(runner)
    runner.engine.gate.clear()
    thread, results = in_thread(server.request, PATH, LONG)
    eventually(lambda: runner.load.num_running)
    server.signal()
    server.signal()
    server.join()
    assert "does not end" in str(server.failure) and runner.engine.caches
    runner.engine.gate.set()
    thread.join()
    assert results[0][0] == 500


def test_fault_of_a_pass_is_told_and_later_requests_run():
    runner = make_runner()
    with ServerThread(runner) as server:
        runner.engine.fault = RuntimeError("the pass failed")
        status, error = server.refusal(PATH, SHORT)
        assert status == 500 and error["message"] == "the request failed: RuntimeError: the pass failed"
        assert answers(server)


def test_end_of_the_engine_thread_ends_the_server():
    runner = make_runner()
    server = ServerThread(runner)
    runner.engine.fault = SystemExit("killed")
    status, error = server.refusal(PATH, SHORT)
    assert status == 500 and "the engine thread has ended" in error["message"]
    server.join()
    assert "the engine thread has ended: SystemExit('killed')" in str(server.failure)


def test_idle_server_uses_next_to_no_processor_time(server):
    assert answers(server)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.2


def test_many_clients_at_once_get_the_runner_s_own_answers():
    prompts = [[n + 1] for n in range(24)]
    params = [SamplingParams(seed=n, max_tokens=20) for n in range(24)]
    expected = [answer.outputs[0].token_ids for answer in make_runner().generate(prompts, params)]
    with ServerThread(make_runner(max_batch_size=8)) as server:
        bodies = [
            {"prompt": prompt, "seed": n, "max_tokens": 20, "return_token_ids": True}
            for n, prompt in enumerate(prompts)
        ]
        calls = [in_thread(server.request, PATH, body) for body in bodies]
        for thread, _ in calls:
            thread.join()
    assert [results[0][2]["choices"][0]["token_ids"] for _, results in calls] == expected
