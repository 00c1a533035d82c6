"""Every architecture from a Hugging Face directory to an opened engine, and what is refused on the way."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny import MODELS, checkpoint_tensors, random_ids, save_hf, tiny_llama, tiny_model

from quasar_trt.architectures import ARCHITECTURES
from quasar_trt.builders.build import build
from quasar_trt.drafters.base import Draft
from quasar_trt.engines import open_engine
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.reference import load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

QUICK = {"progress": False, "calib_size": 4, "calib_max_seq_length": 32}


def logits(engine, ids) -> np.ndarray:
    """Rows of all of `ids`, the later ones as draft tokens."""
    kept = []

    def accept(index, rows):
        kept.append(np.array(rows))
        return Acceptance((), len(rows) - 1)

    engine.step([SequenceStep(engine.open(), ids[:1], Draft(tuple(ids[1:])))], accept)
    return kept[0]


def test_every_supported_architecture_is_tried():
    assert MODELS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", MODELS)
def test_an_int8_engine_is_near_its_model(architecture, tmp_path):
    source = tiny_model(architecture, 2)
    build(str(save_hf(source, tmp_path / "model")), tmp_path / "int8", Recipe(), **QUICK)
    config, tensors = checkpoint_tensors(source)
    ids = random_ids(config, 40)
    with torch.no_grad():
        expected = source(torch.tensor([ids])).logits[0].numpy()
    for name in ("cpu", "reference"):
        error = logits(open_engine(tmp_path / "int8", name), ids) - expected
        # random weights are the hardest case for 8 bits: an error of a few hundredths of the spread
        assert np.sqrt((error**2).mean()) < 0.08 * expected.std(), name
    assert json.loads((tmp_path / "int8" / "fidelity.json").read_text())["kl"] < 0.05

    stored = load_tensors(tmp_path / "int8" / "checkpoint" / "rank0.safetensors")
    described = json.loads((tmp_path / "int8" / "checkpoint" / "config.json").read_text())
    norms = [name for name in tensors if name.endswith(("q_layernorm.weight", "k_layernorm.weight"))]
    assert described["qk_layernorm"] == bool(norms) == (architecture == "Qwen3ForCausalLM")
    for name in norms:  # no smoother is folded into these
        assert torch.equal(stored[name], tensors[name])

    drafted, plain = (
        Runner.from_dir(tmp_path / "int8", drafter=drafter).generate([ids], SamplingParams(temperature=0, max_tokens=8))
        for drafter in ("ngram", None)
    )
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_dynamic_rope_is_built_up_to_its_original_maximum(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    source = tiny_llama(2, rope_scaling=scaling, max_position_embeddings=48)
    model = str(save_hf(source, tmp_path / "model"))
    with pytest.raises(QuasarError, match=r"max_seq_len is 49; this model allows 2 to 48 .*'dynamic'"):
        build(model, tmp_path / "out", Recipe("none"), max_seq_len=49, progress=False)
    manifest = build(model, tmp_path / "out", Recipe("none"), progress=False)
    assert manifest.limits.max_seq_len == 48
    ids = random_ids(checkpoint_tensors(source)[0], 48)
    with torch.no_grad():
        expected = source(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(logits(open_engine(tmp_path / "out"), ids) - expected).mean() < 1e-2


def test_a_sliding_window_is_refused_by_name_and_built_where_it_changes_nothing(tmp_path):
    source = tiny_model("MistralForCausalLM", 2, sliding_window=32)
    model = str(save_hf(source, tmp_path / "model"))
    for length in (None, 33):
        with pytest.raises(QuasarError, match=r"MistralForCausalLM has sliding_window = 32 in use.*max_seq_len to 32"):
            build(model, tmp_path / "out", Recipe("none"), max_seq_len=length, progress=False)
    build(model, tmp_path / "out", Recipe("none"), max_seq_len=32, progress=False)
    ids = random_ids(checkpoint_tensors(source)[0], 32)
    with torch.no_grad():
        expected = source(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(logits(open_engine(tmp_path / "out"), ids) - expected).mean() < 1e-2
