"""/metrics, /health, /version, the log: what operators see."""

from __future__ import annotations

import logging

from prometheus_client.parser import text_string_to_metric_families
from server_thread import ServerThread
from stubs import ByteTokenizer, StubDrafter, StubEngine, perfect_rule, random_logits

from quasar_trt import __version__
from quasar_trt.runner import Runner

VOCAB = 257
LOGITS = random_logits(VOCAB, seed=5, spread=4.0)
PATH = "/v1/completions"


def make_runner() -> Runner:
    return Runner(StubEngine(LOGITS, VOCAB), drafter=StubDrafter(perfect_rule(LOGITS), 3), tokenizer=ByteTokenizer())


def read(server: ServerThread) -> dict[tuple, float]:
    """{(name without prefix, label values...): value}"""
    _, headers, text = server.request("/metrics")
    assert headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    assert all(sample.name.startswith("quasar_trt:") for sample in samples)
    return {(sample.name.removeprefix("quasar_trt:"), *sample.labels.values()): sample.value for sample in samples}


def test_counts_are_those_of_the_answers():
    with ServerThread(make_runner(), ByteTokenizer(), drafter="stub") as server:
        before = read(server)
        assert before["spec_decode_num_drafts_total",] == before["generation_tokens_total",] == 0
        body = {"prompt": "ab", "temperature": 0, "max_tokens": 9, "ignore_eos": True}
        _, _, answer = server.request(PATH, body)
        server.request(PATH, body | {"stream": True, "max_tokens": 1})
        server.refusal(PATH, body | {"top_p": 7})
        server.refusal(PATH, body | {"stop_token_ids": [999], "stream": True})
        server.refusal("/nowhere", None)
        found = read(server)
    speculation = answer["usage"]["speculation"]
    assert found["generation_tokens_total",] == 10
    assert found["prompt_tokens_total",] == 4
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert found[f"spec_decode_{name}_total",] == speculation[name]
    per_position = [found["spec_decode_num_accepted_tokens_per_pos_total", str(n)] for n in range(3)]
    assert sum(per_position) == speculation["num_accepted_tokens"] and per_position[0] == speculation["num_drafts"]
    assert found["request_success_total", "length"] == 2
    assert [name for name in found if name[0] == "request_success_total"] == [("request_success_total", "length")]
    assert found["http_requests_total", PATH, "200"] == 2
    assert found["http_requests_total", PATH, "400"] == 2
    assert found["http_requests_total", "other", "404"] == 1
    assert found["num_requests_running",] == found["num_requests_waiting",] == 0
    assert 0 <= found["kv_cache_usage_perc",] <= 1
    assert found["time_to_first_token_seconds_count",] == 2
    assert found["inter_token_latency_seconds_count",] == 10 - 4 - 1
    buckets = [value for (name, *_), value in found.items() if name == "inter_token_latency_seconds_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == 5
    assert found["verify_seconds_total",] > 0


def test_each_request_leaves_a_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, "quasar_trt.server")
    with ServerThread(make_runner(), ByteTokenizer(), drafter="stub") as server:
        body = {"prompt": "ab", "temperature": 0, "max_tokens": 9, "ignore_eos": True, "user": "me\nERROR"}
        for streams in (False, True):
            server.request(PATH, body | {"stream": streams})
    lines = [record.getMessage() for record in caplog.records if "emitted" in record.getMessage()]
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("cmpl-") and "of 'me\\nERROR': 2 prompt tokens, 9 emitted in " in line
        assert "length, draft acceptance = 1.000 (6 accepted / 6 drafted), mean acceptance length = 3.00" in line


def test_health_version_and_models():
    with ServerThread(make_runner(), ByteTokenizer(), drafter="stub", served_model_name="a/b") as server:
        assert server.request("/health")[2] == {"status": "ok"}
        assert server.request("/version")[2] == {"version": __version__}
        (model,) = server.request("/v1/models")[2]["data"]
        assert (model["id"], model["object"], model["max_model_len"], model["drafter"]) == ("a/b", "model", 256, "stub")
        assert server.request("/v1/models/a/b")[2] == model
