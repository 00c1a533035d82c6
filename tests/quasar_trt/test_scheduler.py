"""Interrupted passes, failing calls and impossible limits: no request is lost, none goes on at a wrong position."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from stubs import SamplingDrafter, StubDrafter, StubEngine, perfect_rule, random_logits

from quasar_trt.errors import QuasarError
from quasar_trt.kv_budget import KvBudget
from quasar_trt.request import Request
from quasar_trt.runner import Runner
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.scheduler import Scheduler

VOCAB = 6
LOGITS = random_logits(VOCAB, seed=3)


def ids(stream) -> list[int]:
    return [token for output in stream for token in output.token_ids]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, QuasarError])
@pytest.mark.parametrize(
    ("place", "drafted"), [("accept", False), ("accept", True), ("engine", False), ("engine", True), ("observe", True)]
)
def test_stream_goes_on_with_its_own_ids_after_a_neighbour_was_interrupted(error, drafted, place, monkeypatch):
    """The neighbour comes second in the pass, so that the stream's rows are already in the cache."""
    params = SamplingParams(seed=5, max_tokens=25)
    plain = Runner(StubEngine(LOGITS, VOCAB)).generate([1, 2, 1], params)[0].outputs[0].token_ids

    def logits(prefix):
        if place == "engine" and prefix[0] == 4 and len(prefix) == 3:
            raise error("stopped")
        return LOGITS(prefix)

    drafter = StubDrafter(perfect_rule(LOGITS), num_speculative_tokens=3) if drafted else None
    engine = StubEngine(logits, VOCAB)
    runner = Runner(engine, drafter=drafter)
    accept = Request.accept

    def interrupted_accept(request, *args):
        if place == "accept" and request.context[0] == 4:
            raise error("stopped")
        return accept(request, *args)

    def interrupted_observe(request_id, emitted, num_accepted_tokens):
        if request_id == 1:
            raise error("stopped")

    monkeypatch.setattr(Request, "accept", interrupted_accept)
    if place == "observe":
        monkeypatch.setattr(drafter, "observe", interrupted_observe)
    stream = runner.stream([1, 2, 1], params)
    found = list(next(stream).token_ids)
    with pytest.raises(error, match="stopped"):
        runner.generate([4, 4, 4], SamplingParams(seed=1, max_tokens=5))
    assert found + ids(stream) == plain
    assert not engine.caches


def test_request_that_finished_in_an_interrupted_pass_does_not_go_on():
    """Two requests; the first ends with the pass whose second observation fails, then the second finishes alone."""

    class Failing(StubDrafter):
        def observe(self, request_id, emitted, num_accepted_tokens):
            if request_id == 1 and not self.calls.count(("failed",)):
                self.calls.append(("failed",))
                raise RuntimeError("observe failed")

    engine = StubEngine(LOGITS, VOCAB)
    scheduler = Scheduler(engine, Failing(lambda context, limit: []), 2, 8, KvBudget(engine))
    requests = [request(0, max_tokens=1), request(1, max_tokens=4)]
    for each in requests:
        scheduler.submit(each)
    with pytest.raises(RuntimeError, match="observe failed"):
        scheduler.step()
    while requests[1].finish_reason is None:
        scheduler.step()
    assert [each.token_ids for each in requests] == [plain(1), plain(4)]
    assert not engine.caches


def request(request_id: int, max_tokens: int) -> Request:
    return Request(request_id, None, [1, 2], SamplingParams(temperature=0, max_tokens=max_tokens), (), 256)


def plain(max_tokens: int) -> list[int]:
    return perfect_rule(LOGITS)([1, 2], max_tokens)


def test_request_whose_sequence_cannot_be_opened_still_waits():
    class Full(StubEngine):
        failures = 1

        def open(self):
            if self.caches and self.failures:
                self.failures -= 1
                raise MemoryError("no room for a sequence")
            return super().open()

    engine = Full(LOGITS, VOCAB)
    scheduler = Scheduler(engine, None, 4, 0, KvBudget(engine))
    requests = [request(0, 3), request(1, 4)]
    for each in requests:
        scheduler.submit(each)
    with pytest.raises(MemoryError, match="no room"):
        scheduler.step()
    for _ in range(4):
        scheduler.step()
    assert [each.token_ids for each in requests] == [plain(3), plain(4)]
    assert not engine.caches


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0; allowed: 1 or more"),
        ({"max_batch_size": -2}, "max_batch_size is -2"),
        ({"max_draft_len": -1}, "max_draft_len is -1; allowed: 0"),
    ],
)
def test_limit_that_leaves_nothing_to_do_is_refused(limits, message):
    with pytest.raises(QuasarError, match=message):
        Runner(StubEngine(LOGITS, VOCAB), **limits)


def test_no_draft_tokens_allowed_means_plain_decoding():
    runner = Runner(StubEngine(LOGITS, VOCAB), max_draft_len=0)
    params = SamplingParams(temperature=0, max_tokens=6)
    assert runner.generate([1, 2], params)[0].outputs[0].token_ids == plain(6)


@pytest.mark.parametrize(
    "filters", [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 3}, {"temperature": 1.0, "top_p": 0.8}]
)
def test_drafter_with_the_requests_own_probabilities_keeps_the_distribution(filters):
    """4 000 seeded requests of 3 tokens over 4 ids; every share within 0.027 of the target's (3.4 standard deviations)."""
    count, vocab, prompt = 4000, 4, (1, 2)
    target, other = (functools.cache(random_logits(vocab, seed=seed, spread=1.0)) for seed in (1, 2))

    expected = np.zeros((3, vocab))
    sampler = Sampler(SamplingParams(**filters))
    weights = {prompt: 1.0}
    for position in range(3):
        longer = {}
        for (prefix, weight), token in itertools.product(weights.items(), range(vocab)):
            share = weight * sampler.target(target(prefix)).probability(token)
            expected[position, token] += share
            longer[(*prefix, token)] = share
        weights = longer

    runner = Runner(StubEngine(target, vocab), drafter=SamplingDrafter(other, num_speculative_tokens=2))
    params = [SamplingParams(seed=seed, max_tokens=3, **filters) for seed in range(count)]
    outputs = runner.generate([list(prompt)] * count, params)
    emitted = np.array([output.outputs[0].token_ids for output in outputs])
    found = np.stack([np.bincount(emitted[:, position], minlength=vocab) for position in range(3)]) / count
    np.testing.assert_allclose(found, expected, atol=0.027)
    assert 0.2 < runner.stats.acceptance_rate < 0.95
