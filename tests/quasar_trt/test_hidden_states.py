"""Engines give the hidden states of any row, only where they were asked to, and say how they lead to the source model's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_steps import prefill, rows_of
from tiny import random_ids

from quasar_trt.drafters.base import Draft
from quasar_trt.engines import open_engine
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.engines.source_basis import FILE
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.runner import Runner

ALL = range(8)  # of a model of 7 layers


@pytest.fixture(scope="module")
def engines(deep_dirs):
    opened = {
        (weights, name): open_engine(path, name, threads=1)
        for weights, path in deep_dirs.items()
        for name in ("cpu", "reference")
    }
    torch.set_num_threads(1)
    return opened


@torch.no_grad()
def source_states(model, ids) -> np.ndarray:
    """[tokens, places, hidden_size] of the source, in float32."""
    return torch.stack(model(torch.tensor([ids]), output_hidden_states=True).hidden_states, dim=2)[0].numpy()


def states_of(engine, ids, chunk=None) -> np.ndarray:
    """Of a text from its start, read in chunks."""
    found, sequence = [], engine.open()
    for start in range(0, len(ids), chunk or len(ids)):
        part = ids[start : start + (chunk or len(ids))]
        rows_of(engine, [SequenceStep(sequence, part)])
        found.append(engine.hidden_states(0, range(len(part))))
    engine.close(sequence)
    return np.concatenate(found)


def in_source(engine, states, places) -> np.ndarray:
    """States [tokens, places, hidden_size] in the basis of the source model."""
    turns = [engine.source_basis.to_source(behind_norm=place == 7) for place in places]
    return np.stack(
        [x if turn is None else x @ turn.T for x, turn in zip(states.swapaxes(0, 1), turns, strict=True)], 1
    )


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize(("weights", "largest"), [("BF16", 0.02), ("INT8", 0.35)])
def test_states_are_those_of_the_source_model(engines, deep_model, name, weights, largest):
    """Relative errors: of BF16 keys and values, and of INT8 layers one after the other; another basis would be at 1.4."""
    engine, ids = engines[weights, name], random_ids(engines[weights, name].config, 30)
    engine.keep_hidden_states(ALL)
    found, expected = in_source(engine, states_of(engine, ids), ALL), source_states(deep_model, ids)
    assert found.dtype == np.float32 and found.shape == expected.shape
    errors = [np.linalg.norm(found[:, i] - expected[:, i]) / np.linalg.norm(expected[:, i]) for i in ALL]
    assert max(errors) < largest and errors[0] < 0.01


@pytest.mark.parametrize("weights", ["BF16", "INT8"])
def test_both_engines_give_the_same_states(engines, weights):
    ids = random_ids(engines[weights, "cpu"].config, 30)
    found = []
    for name in ("cpu", "reference"):
        engines[weights, name].keep_hidden_states([7, 3])
        found.append(states_of(engines[weights, name], ids))
    assert np.median(np.abs(found[0] - found[1])) < 1e-3 * found[0].std()


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("weights", ["BF16", "INT8"])
def test_the_head_and_the_embedding_are_those_of_the_source(engines, deep_model, name, weights):
    engine = engines[weights, name]
    ids = random_ids(engine.config, 12)
    states = source_states(deep_model, ids)
    expected = deep_model.lm_head.weight.detach().numpy()
    embedded = in_source(engine, engine.embeddings(ids)[:, None], [0])[:, 0]
    np.testing.assert_allclose(embedded, states[:, 0], atol=0.01 * states[:, 0].std())
    logits, turn = states[:, -1] @ expected.T, engine.source_basis.for_head()
    found = engine.head_logits(states[:, -1] if turn is None else states[:, -1] @ turn.T)
    np.testing.assert_allclose(found, logits, atol=0.05 * logits.std())


@pytest.mark.parametrize("weights", ["BF16", "INT8"])
def test_states_are_invariant_bit_for_bit(deep_dirs, engines, weights):
    """Whatever shares the pass, however the prompt was cut, with one thread or three, in a tree or not."""
    one = engines[weights, "cpu"]
    ids = random_ids(one.config, 40)
    one.keep_hidden_states([2, 7])
    expected = states_of(one, ids)
    three = CpuEngine(deep_dirs[weights] / "rank0.engine", max_seq_len=100, threads=3)
    three.keep_hidden_states([2, 7])
    np.testing.assert_array_equal(states_of(three, ids, chunk=7), expected)
    other, sequence = prefill(three, ids[:9])[0], prefill(three, ids[:36])[0]
    tree = Draft((ids[37] ^ 1, ids[37], ids[38] ^ 1, ids[38]), (-1, -1, 1, 1))
    batch = [SequenceStep(other, [1, 2], Draft((3,))), SequenceStep(sequence, [ids[36]], tree)]
    three.step(batch, lambda index, logits: Acceptance((0,), *[(0,), (2, (1, 3))][index]))
    np.testing.assert_array_equal(three.hidden_states(1, [0, 2, 4]), expected[36:39])


def test_nothing_is_kept_unless_asked(engines):
    engine = engines["BF16", "cpu"]
    engine.keep_hidden_states([])
    prefill(engine, [1, 2, 3])
    assert engine.hidden_states(0, [0]).shape == (1, 0, 42)
    engine.keep_hidden_states([7])
    with pytest.raises(ValueError, match="no state 0 of row 3"):
        prefill(engine, [1, 2, 3])
        engine.hidden_states(0, [3])
    with pytest.raises(ValueError, match="there is no layer 8"):
        engine.keep_hidden_states([8])


def test_a_rotated_engine_without_its_basis_gives_no_states(deep_dirs, tmp_path):
    assert FILE in Manifest.open(deep_dirs["INT8"]).files and FILE not in Manifest.open(deep_dirs["BF16"]).files
    (tmp_path / "rank0.engine").symlink_to(deep_dirs["INT8"] / "rank0.engine")
    engine = CpuEngine(tmp_path / "rank0.engine", max_seq_len=64, threads=1)
    assert not engine.capabilities.hidden_states
    from quasar_trt.drafters.registry import make_drafter

    with pytest.raises(QuasarError, match="drafter 'medusa' reads hidden states, which this engine does not give"):
        Runner(engine, drafter=make_drafter("medusa:nowhere"))
