"""The script that writes random checkpoints: real shapes, sane sizes, readable by transformers and by the builder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quasar_trt.builders.convert import Converter
from quasar_trt.builders.hf_config import model_config
from quasar_trt.builders.source import open_source, source_shapes
from quasar_trt.errors import QuasarError
from quasar_trt.tokenizer import encode, load_tokenizer

SCRIPT = Path(__file__).parents[1] / "scripts" / "random_checkpoint.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("random_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written(script, tmp_path_factory):
    directory = tmp_path_factory.mktemp("random") / "model"
    script.write_checkpoint(directory, script.SHAPES["tiny"], seed=3, shard_bytes=4_000_000)
    return directory


@torch.no_grad()
def test_transformers_and_the_builder_read_the_same_sane_model(written):
    model = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    source = open_source(str(written))
    assert source.notices == [] and source.eos_token_ids == (256,)
    tensors = Converter(source)
    assert torch.equal(tensors["lm_head.weight"].float(), model.lm_head.weight)
    down = model.model.layers[3].mlp.down_proj.weight
    assert torch.equal(tensors["transformer.layers.3.mlp.proj.weight"].float(), down)
    ids = encode(load_tokenizer(written), "The quick brown fox jumps over the lazy dog.")
    assert ids == encode(load_tokenizer(written), "The quick brown fox") + ids[19:] and max(ids) < 256
    states = model(torch.tensor([ids]), output_hidden_states=True)
    deviations = [float(state.std()) for state in states.hidden_states]
    assert min(deviations) > 0.5 and max(deviations) < 4, deviations
    assert 0.5 < states.logits.std() < 4
    # a channel that smoothing has something to do with
    norm = model.model.layers[0].input_layernorm.weight
    assert (norm > 6).sum() == 1 and norm.median() < 1.1


def test_shards_are_bounded_and_bytes_follow_from_the_seed(script, written, tmp_path):
    shards = sorted(written.glob("*.safetensors"))
    assert len(shards) > 3 and all(shard.stat().st_size < 4_100_000 for shard in shards)
    for seed, same in ((3, True), (4, False)):
        script.write_checkpoint(tmp_path / str(seed), script.SHAPES["tiny"], seed=seed, shard_bytes=4_000_000)
        again = (tmp_path / str(seed) / shards[1].name).read_bytes()
        assert (again == shards[1].read_bytes()) == same


def test_an_existing_directory_is_refused_and_a_failure_leaves_none(script, written, tmp_path, monkeypatch):
    with pytest.raises(QuasarError, match="exists"):
        script.write_checkpoint(written, script.SHAPES["tiny"])
    monkeypatch.setattr(script, "_write_shards", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        script.write_checkpoint(tmp_path / "model", script.SHAPES["tiny"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("like", "parameters"),
    [
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-0.6b", 596_049_920),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_shapes_have_the_published_number_of_parameters(script, like, parameters):
    shapes = source_shapes(model_config(script.SHAPES[like], like))
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters


def test_the_command_cuts_layers_and_gives_errors_in_one_line(script, tmp_path, monkeypatch, capsys):
    arguments = [str(SCRIPT), str(tmp_path / "model"), "--like", "tiny", "--layers", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()
    assert "model.safetensors: 25 tensors" in capsys.readouterr().out
    assert open_source(str(tmp_path / "model")).config.num_hidden_layers == 2
    with pytest.raises(SystemExit, match=r"error: .* exists"):
        script.main()
