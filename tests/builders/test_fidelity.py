"""Fidelity against itself, against values worked out by hand, and for an INT8 engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import random_ids, tiny_checkpoint

from quasar_trt.builders.fidelity import measure
from quasar_trt.engines.base import Capabilities
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe


class StubModel:
    """Gives the same distribution in every row."""

    def __init__(self, probabilities):
        self.logits = torch.tensor(probabilities).log()

    def __call__(self, ids):
        return self.logits.repeat(len(ids), 1)


class StubEngine:
    """Gives row i of the window the distribution `rows[i % len(rows)]`, and records the passes."""

    capabilities = Capabilities(
        max_rows=4, accepts_inside=False, tree=False, hidden_states=False, fork=False, exact=True
    )

    def __init__(self, *rows):
        self.rows = [np.log(np.array(row, dtype=np.float32)) + 3 for row in rows]  # the constant must not matter
        self.cached = None
        self.passes = []

    def open(self):
        self.cached = []
        return 0

    def close(self, sequence):
        self.cached = None

    def step(self, batch, accept):
        (entry,) = batch
        ids = [*entry.tokens, *entry.draft.ids]
        self.passes.append(ids)
        logits = np.stack([self.rows[(len(self.cached) + i) % len(self.rows)] for i in range(len(ids))])
        acceptance = accept(0, logits)
        assert acceptance.num_accepted_tokens == len(entry.draft)
        self.cached += ids
        logits[:] = np.nan  # logits are valid only during the call
        return [acceptance]


def test_values_are_those_worked_out_by_hand():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    engine = StubEngine(p, q)
    found = measure(StubModel(p), engine, [[0, 1, 2, 0, 1, 1], [2, 0]])
    # Rows alternate between p itself and q, in windows of 6 and 2 rows: half of the 8 positions differ by `far`.
    far = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found["tokens"] == 8
    assert found["kl"] == pytest.approx(far / 2, abs=1e-7)
    assert found["kl_standard_error"] == pytest.approx(math.sqrt(8 * (far / 2) ** 2 / 7) / math.sqrt(8), abs=1e-7)
    assert found["top1_agreement"] == 0.5
    # Tokens that follow: 1 2 0 1 1 under rows p q p q p, then 0 under row p.
    source = [0.25, 0.25, 0.5, 0.25, 0.25, 0.5]
    engine_side = [0.25, 0.25, 0.5, 0.5, 0.25, 0.5]
    assert found["source_perplexity"] == pytest.approx(math.exp(-np.log(source).mean()), abs=1e-6)
    assert found["engine_perplexity"] == pytest.approx(math.exp(-np.log(engine_side).mean()), abs=1e-6)
    assert found["text"] == "2 windows of at most 6 tokens"


def test_windows_are_cut_to_the_rows_of_a_pass_and_closed():
    engine = StubEngine([0.5, 0.5])
    measure(StubModel([0.5, 0.5]), engine, [[0, 1, 1, 0, 1, 0, 0, 1, 1]])
    assert engine.passes == [[0, 1, 1, 0], [1, 0, 0, 1], [1]]
    assert engine.cached is None


def test_an_engine_that_is_its_source_has_no_distance():
    model = ReferenceModel(*tiny_checkpoint(1))
    engine = ReferenceEngine(model, max_seq_len=128, kv_dtype=torch.float32)
    found = measure(model, engine, [random_ids(model.config, n, seed=n) for n in (100, 2, 65)])
    assert found["tokens"] == 167
    assert abs(found["kl"]) < 1e-9
    assert found["top1_agreement"] == 1.0
    assert found["engine_perplexity"] == pytest.approx(found["source_perplexity"], rel=1e-5)


def test_an_int8_engine_is_near_its_source_but_not_equal():
    source = ReferenceModel(*tiny_checkpoint(1))
    engine = ReferenceEngine(ReferenceModel(*tiny_checkpoint(1, Recipe("int8"))), max_seq_len=128)
    found = measure(source, engine, [random_ids(source.config, 100)])
    assert 1e-4 < found["kl"] < 0.02
    assert 0 < found["kl_standard_error"] < found["kl"]
    assert 0.8 < found["top1_agreement"] < 1.0


def test_the_bar_goes_to_stderr_and_only_when_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal as far as the bar is concerned
    model = StubModel([0.5, 0.5])
    measure(model, StubEngine([0.5, 0.5]), [[0, 1]])
    assert capsys.readouterr() == ("", "")
    measure(model, StubEngine([0.5, 0.5]), [[0, 1]], progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "Measuring fidelity" in shown.err


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(QuasarError, match="kl is nan"):
        measure(StubModel([0.5, math.nan]), StubEngine([0.5, 0.5]), [[0, 1]])


@pytest.mark.parametrize("texts", [[], [[1, 2], [3]]])
def test_too_little_text_is_refused(texts):
    with pytest.raises(ValueError, match="at least 2 tokens"):
        measure(StubModel([0.5, 0.5]), StubEngine([0.5, 0.5]), texts)
