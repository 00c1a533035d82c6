"""Requests that schemathesis makes of the server's own OpenAPI description, in order and not: none is a server's error."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_thread import ChatTokenizer, ServerThread
from stubs import ByteTokenizer, StubDrafter, StubEngine, perfect_rule, random_logits

from quasar_trt.runner import Runner

LOGITS = random_logits(257)
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.fixture(scope="module")
def server():
    engine = StubEngine(LOGITS, 257, max_seq_len=32)
    runner = Runner(engine, drafter=StubDrafter(perfect_rule(LOGITS), 3), tokenizer=ByteTokenizer())
    with ServerThread(runner, ChatTokenizer(), drafter="stub", max_requests=64) as server:
        yield server
        load = server.runner.load
        assert load.num_running == load.num_waiting == 0


OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{name}"),
]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_request_is_answered_as_described(server, description, method, path, mode):
    try:
        requests = description[path][method].as_strategy(generation_mode=mode)
        ask(requests, server.url)
    except hypothesis.errors.Unsatisfiable:
        assert method == "GET"  # any text is a name


def ask(requests, url: str) -> None:
    @hypothesis.settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(requests)
    def check(case):
        if isinstance(case.body, dict):  # hardly any name that is made up is that of the model
            for name in ("model", "drafter"):
                case.body.pop(name, None)
        case.call_and_validate(base_url=url, checks=CHECKS)

    check()


def test_description_has_every_endpoint(description):
    found = {(method.upper(), path) for path, methods in description.raw_schema["paths"].items() for method in methods}
    assert found == {*OPERATIONS, ("GET", "/v1/models"), ("GET", "/health"), ("GET", "/version"), ("GET", "/metrics")}


@pytest.fixture(scope="module")
def description(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")
