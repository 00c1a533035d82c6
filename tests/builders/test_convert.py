"""A source under checkpoint names: complete, fused, read only when asked for and kept by nobody."""

from __future__ import annotations

import pytest
import torch
from tiny import MODELS, checkpoint_tensors, save_hf, tiny_llama, tiny_model
from watched_source import WatchedSource

from quasar_trt.builders.convert import Converter
from quasar_trt.builders.source import open_source
from quasar_trt.checkpoint import checkpoint_spec
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe


@pytest.mark.parametrize("architecture", MODELS)
def test_names_and_shapes_are_those_of_an_unquantized_checkpoint(architecture, tmp_path):
    source = open_source(str(save_hf(tiny_model(architecture, 1), tmp_path)))
    found = Converter(source)
    spec = checkpoint_spec(source.config, Recipe("none"))
    assert found.keys() == spec.keys() and len(found) == len(spec)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in spec.items()
    }


def test_a_layer_is_all_of_its_tensors_and_no_other_layers(tmp_path):
    model = tiny_llama(2, num_hidden_layers=11, attention_bias=True)
    source = open_source(str(save_hf(model, tmp_path)))
    _, expected = checkpoint_tensors(model)
    for i in (0, 1, 10):
        prefix = f"transformer.layers.{i}."
        found = Converter(source).layer(i)
        assert found.keys() == {name for name in expected if name.startswith(prefix)}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_nothing_is_read_before_it_is_asked_for_and_nothing_is_kept(tmp_path):
    source = WatchedSource(open_source(str(save_hf(tiny_llama(3), tmp_path))))
    converter = Converter(source)
    assert source.read == []
    qkv = converter["transformer.layers.1.attention.qkv.weight"]
    assert source.read == [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    norm = converter["transformer.ln_f.weight"]
    assert source.alive() == {"model.norm.weight"}  # q, k and v were copied into one
    del qkv, norm
    assert source.alive() == frozenset()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_when_it_is_read(value, tmp_path):
    model = tiny_llama(4)
    model.model.layers[1].self_attn.k_proj.weight.data[3, 5] = value
    converter = Converter(open_source(str(save_hf(model, tmp_path))))
    converter.layer(0)
    with pytest.raises(
        QuasarError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight has values that are NaN or inf"
    ):
        converter.layer(1)
