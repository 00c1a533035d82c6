"""Fidelity of whole engines: against a plain computation, by layer, rotated, and in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import (
    checkpoint_tensors,
    random_ids,
    save_hf,
    tiny_checkpoint,
    tiny_llama,
    write_engine_dir,
)
from watched_source import WatchedSource

from quasar_trt.builders import fidelity
from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.builders.fidelity import measure
from quasar_trt.builders.progress import Stages
from quasar_trt.builders.rotate import rotation
from quasar_trt.builders.source import open_source
from quasar_trt.drafters.base import NO_DRAFT
from quasar_trt.engines import open_engine
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe

TEXTBOOK = Recipe("int8", smoothquant=0.5)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(1)


@pytest.fixture(scope="module")
def source(model, tmp_path_factory):
    return open_source(str(save_hf(model, tmp_path_factory.mktemp("source"))))


def engine_dir(directory, recipe, tensors, config):
    write_engine_dir(directory, config, recipe, tensors)
    compile_cpu(config, recipe, tensors, directory / "rank0.engine")
    return directory


@pytest.fixture(scope="module")
def int8_dir(tmp_path_factory):
    config, recipe, tensors = tiny_checkpoint(1, TEXTBOOK)
    return engine_dir(tmp_path_factory.mktemp("engine") / "int8", recipe, tensors, config)


def measured(source, directory, windows):
    return measure(source, directory, windows, "random", threads=1, stages=Stages(False))


def windows_of(source, *sizes):
    return [random_ids(source.config, size, seed=size) for size in sizes]


@torch.no_grad()
def source_pass(model, ids):
    """transformers in float64: logits [rows, vocab], and the hidden states after each layer."""
    states = []
    hooks = [layer.register_forward_hook(lambda *call: states.append(call[-1])) for layer in model.model.layers]
    logits = model.double()(torch.tensor([ids])).logits[0]
    model.float()
    for hook in hooks:
        hook.remove()
    return logits.numpy(), [(state[0] if isinstance(state, tuple) else state).reshape(len(ids), -1) for state in states]


def engine_pass(directory, ids):
    """The opened engine token by token: logits [rows, vocab]."""
    engine, rows = open_engine(directory, threads=1), []
    sequence = engine.open()
    for token in ids:
        engine.step(
            [SequenceStep(sequence, [token], NO_DRAFT)],
            lambda index, logits: rows.append(logits[0].copy()) or Acceptance((0,), 0),
        )
    return np.stack(rows).astype(np.float64)


def batch_means(values):
    """The standard error of 137 values out of 12 runs of 11."""
    return np.reshape(values[:132], (12, 11)).mean(axis=1).std(ddof=1) * np.sqrt(11 / 137)


def log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("rows", [(1024, 64), (50, 7)], ids=["few blocks", "many blocks"])
def test_values_are_those_of_a_plain_computation_in_float64(rows, model, source, int8_dir, monkeypatch):
    monkeypatch.setattr(fidelity, "_LAYER_ROWS", rows[0])
    monkeypatch.setattr(fidelity, "_LOGIT_ROWS", rows[1])
    windows = windows_of(source, 40, 2, 65, 30)
    config, recipe, tensors = tiny_checkpoint(1, TEXTBOOK)
    int8 = ReferenceModel(config, recipe, tensors)
    kl, top1, top5, source_next, engine_next, errors = [], [], [], [], [], [[] for _ in range(3)]
    for ids in windows:
        logits, states = source_pass(model, ids)
        p, q = log_softmax(logits), log_softmax(engine_pass(int8_dir, ids))
        kl += (np.exp(p) * (p - q)).sum(axis=1).tolist()
        best = p.argmax(axis=1)
        order = np.argsort(-q, axis=1)
        top1 += (order[:, 0] == best).tolist()
        top5 += (order[:, :5] == best[:, None]).any(axis=1).tolist()
        source_next += [p[row, token] for row, token in enumerate(ids[1:])]
        engine_next += [q[row, token] for row, token in enumerate(ids[1:])]
        batch = [(ids, int8.new_cache())]
        x = int8.embed(batch)
        for i, state in enumerate(states):
            x = int8.layer(i, x, batch, int8.rotations([(ids, int8.new_cache())]))
            errors[i] += ((x - state).norm(dim=1) / state.norm(dim=1)).tolist()
    found = measured(source, int8_dir, windows)
    assert found["tokens"] == 137
    assert 1e-4 < found["kl"] < 0.05
    assert found["kl"] == pytest.approx(np.mean(kl), rel=1e-3)
    assert found["kl_standard_error"] == pytest.approx(batch_means(kl), rel=1e-3)
    assert found["kl_p99"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert found["top1_agreement"] == np.mean(top1)
    assert found["top1_standard_error"] == pytest.approx(batch_means(top1))
    assert found["top5_agreement"] == np.mean(top5)
    assert found["source_perplexity"] == pytest.approx(np.exp(-np.mean(source_next)), rel=1e-4)
    assert found["engine_perplexity"] == pytest.approx(np.exp(-np.mean(engine_next)), rel=1e-4)
    assert found["layer_errors"] == pytest.approx([np.mean(error) for error in errors], rel=1e-3)
    assert found["text"] == "4 windows of at most 65 tokens, random"


def test_an_engine_of_the_same_weights_differs_by_its_cache_alone(source, tmp_path):
    config, recipe, tensors = tiny_checkpoint(1)
    found = measured(source, engine_dir(tmp_path / "bf16", recipe, tensors, config), windows_of(source, 100, 30))
    assert found["layer_errors"] == [0.0, 0.0, 0.0]  # the layers are compared with caches in float32
    assert 0 < found["kl"] < 1e-4
    assert found["top1_agreement"] > 0.97
    assert found["top5_agreement"] == 1.0
    assert found["engine_perplexity"] == pytest.approx(found["source_perplexity"], rel=1e-3)


def test_a_disturbed_layer_is_where_the_error_begins(source, tmp_path):
    config, recipe, tensors = tiny_checkpoint(1)
    tensors["transformer.layers.2.mlp.proj.weight"] = tensors["transformer.layers.2.mlp.proj.weight"] * 1.25
    found = measured(source, engine_dir(tmp_path / "bf16", recipe, tensors, config), windows_of(source, 60))
    assert found["layer_errors"][:2] == [0.0, 0.0]
    assert found["layer_errors"][2] > 0.05
    assert found["kl"] > 1e-3


def test_a_tied_head_is_the_embedding(tmp_path):
    tied = tiny_llama(2, tie_word_embeddings=True)
    config, tensors = checkpoint_tensors(tied)
    directory = engine_dir(tmp_path / "bf16", Recipe("none"), tensors, config)
    source = open_source(str(save_hf(tied, tmp_path / "source")))
    assert measured(source, directory, windows_of(source, 50))["kl"] < 1e-3  # of logits that are far apart


def rotated_tensors(config, tensors):
    """The tensors of a rotated BF16 model: the stream becomes x Q, norm weights move into what reads them."""
    q = rotation(config.hidden_size)
    found = {name: tensor.float() for name, tensor in tensors.items()}
    found["transformer.vocab_embedding.weight"] = found["transformer.vocab_embedding.weight"] @ q
    readers = {"lm_head": "transformer.ln_f"}
    for i in range(config.num_hidden_layers):
        prefix = f"transformer.layers.{i}."
        readers |= {f"{prefix}attention.qkv": f"{prefix}input_layernorm"}
        readers |= {f"{prefix}mlp.{name}": f"{prefix}post_layernorm" for name in ("fc", "gate")}
        for name in ("attention.dense", "mlp.proj"):
            found[f"{prefix}{name}.weight"] = q.T @ found[f"{prefix}{name}.weight"]
    for linear, norm in readers.items():
        found[f"{linear}.weight"] = found[f"{linear}.weight"] * found[f"{norm}.weight"] @ q
    for norm in set(readers.values()):
        found[f"{norm}.weight"] = torch.ones(config.hidden_size)
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def test_the_states_of_a_rotated_engine_are_turned_back(model, source, tmp_path, monkeypatch):
    config, tensors = checkpoint_tensors(model)
    recipe = Recipe("int8", rotate=True, exclude=("*",))  # rotated, every linear in BF16
    directory = write_engine_dir(tmp_path / "rotated", config, recipe, rotated_tensors(config, tensors))
    monkeypatch.setattr(fidelity, "open_engine", lambda path, threads: ReferenceEngine.from_dir(path))
    found = measured(source, directory, windows_of(source, 80, 20))
    assert all(1e-4 < error < 0.02 for error in found["layer_errors"])  # BF16 rounding; unturned rows would be 1.4 off
    assert found["kl"] < 0.01


def test_the_rotation_is_orthogonal_and_always_the_same():
    q = rotation(48)
    assert q.dtype == torch.float32
    assert torch.allclose(q @ q.T, torch.eye(48), atol=1e-6)
    assert torch.equal(q, rotation(48))
    assert not torch.allclose(q.abs(), torch.eye(48), atol=0.5)


def test_one_layer_of_the_source_is_in_memory_at_a_time(source, int8_dir):
    watched = WatchedSource(source)
    measured(watched, int8_dir, windows_of(source, 30))
    assert set(watched.read) == set(watched.names)
    assert {len(parts) for parts in watched.together} == {1}


def test_rows_in_logits_are_few(source, int8_dir, monkeypatch):
    seen = []
    monkeypatch.setattr(fidelity.Comparison, "add", lambda self, p, q, ids: seen.append((len(p), len(q), len(ids))))
    monkeypatch.setattr(fidelity.Comparison, "figures", lambda self: {"kl": 0.0})
    measured(source, int8_dir, windows_of(source, 130))
    assert seen == [(64, 64, 64), (64, 64, 64), (2, 2, 1)]


def test_logits_that_are_not_finite_are_refused(source, int8_dir, monkeypatch):
    monkeypatch.setattr(fidelity, "_engine_logits", lambda engine, ids: [(0, torch.full((len(ids), 131), torch.nan))])
    with pytest.raises(QuasarError, match="kl is nan") as caught:
        measured(source, int8_dir, windows_of(source, 10))
    assert "\n" not in str(caught.value)


def test_a_layer_that_is_not_finite_is_named(source, tmp_path):
    config, recipe, tensors = tiny_checkpoint(1)
    tensors["transformer.layers.1.mlp.proj.weight"] = tensors["transformer.layers.1.mlp.proj.weight"] * 1e38
    directory = engine_dir(tmp_path / "bf16", recipe, tensors, config)
    with pytest.raises(QuasarError, match=r"the error of layer 1 is (inf|nan)"):
        measured(source, directory, windows_of(source, 10))


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([], "at least 2 tokens"),
        ([[1, 2], [3]], "at least 2 tokens"),
        ([[1] * 257], "257 tokens; this engine allows 256"),
    ],
    ids=["none", "short", "long"],
)
def test_windows_of_a_wrong_size_are_refused(windows, message, source, int8_dir):
    with pytest.raises(ValueError, match=message):
        measured(source, int8_dir, windows)


def test_bars_go_to_stderr(source, int8_dir, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal as far as the bar is concerned
    with Stages(True) as stages:
        measure(source, int8_dir, [[0, 1]], "random", stages=stages)
    shown = capsys.readouterr()
    assert shown.out == "" and "Comparing layers" in shown.err and "Comparing distributions" in shown.err
