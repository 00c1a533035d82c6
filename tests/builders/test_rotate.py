"""The rotated model computes what the source computes: every architecture, in float32, before anything is quantized."""

from __future__ import annotations

import pytest
import torch
from tiny import checkpoint_tensors, random_ids, tiny_model

from quasar_trt.builders import rotate
from quasar_trt.builders.rotate import rotate_layer, rotate_vocabulary, rotation
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.recipe import Recipe

EMBEDDING, HEAD, NORM = "transformer.vocab_embedding.weight", "lm_head.weight", "transformer.ln_f.weight"


def layer_of(tensors: dict, i: int) -> dict:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(f"transformer.layers.{i}.")}


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
        ("PanguEmbeddedForCausalLM", {}),
    ],
)
def test_a_rotated_model_gives_the_logits_of_its_source(architecture, overrides):
    config, tensors = checkpoint_tensors(tiny_model(architecture, 4, **overrides))
    q = rotation(config.hidden_size)
    rotated = {EMBEDDING: tensors[EMBEDDING].float() @ q, NORM: torch.ones(config.hidden_size)}
    rotated[HEAD] = (tensors[HEAD].float() * tensors[NORM].float()) @ q
    for i in range(config.num_hidden_layers):
        layer = rotate_layer(config, i, layer_of(tensors, i), q)
        assert layer.keys() == layer_of(tensors, i).keys()
        for norm in ("input_layernorm", "post_layernorm"):
            assert torch.equal(layer[f"transformer.layers.{i}.{norm}.weight"], torch.ones(config.hidden_size))
        rotated |= layer
    ids = random_ids(config, 40)
    expected = ReferenceModel(config, Recipe("none"), tensors)(ids)
    found = ReferenceModel(config, Recipe("none"), rotated)(ids)
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))


def test_the_layer_given_is_left_alone():
    config, tensors = checkpoint_tensors(tiny_model("Qwen2ForCausalLM", 4))
    layer = layer_of(tensors, 1)
    kept = {name: tensor.clone() for name, tensor in layer.items()}
    rotate_layer(config, 1, layer, rotation(config.hidden_size))
    assert layer.keys() == kept.keys() and all(torch.equal(layer[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("rows", [8192, 50])
def test_a_vocabulary_is_rotated_in_float32_and_rounded_once(rows, monkeypatch):
    monkeypatch.setattr(rotate, "_ROWS", rows)
    config, tensors = checkpoint_tensors(tiny_model("LlamaForCausalLM", 4))
    q = rotation(config.hidden_size)
    embedding, head = tensors[EMBEDDING].double() @ q.double(), tensors[HEAD].double() * tensors[NORM] @ q.double()
    for found, expected in (
        (rotate_vocabulary(tensors[EMBEDDING], q), embedding),
        (rotate_vocabulary(tensors[HEAD], q, tensors[NORM]), head),
    ):
        assert found.dtype == torch.bfloat16
        assert (found != expected.bfloat16()).float().mean() < 0.01  # a tie may round either way
        assert torch.allclose(found.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("size", [1, 48, 96])
def test_the_rotation_is_orthogonal_and_the_same_at_every_call(size):
    q = rotation(size)
    assert q.dtype == torch.float32 and q.shape == (size, size)
    assert torch.allclose(q @ q.T, torch.eye(size), atol=1e-6)
    assert torch.equal(rotation(size), q)


def test_an_outlying_channel_is_spread_over_all():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 100
    y = x @ rotation(96)
    assert torch.allclose(y.norm(dim=1), x.norm(dim=1), rtol=1e-5)
    largest = y.abs().amax(dim=0)
    assert largest.max() < 6 * largest.median()  # it was about a hundred times
