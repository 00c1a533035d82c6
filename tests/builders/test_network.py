"""The decoder's network, executed: what it computes is what the reference model computes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorrt_rtx as trt
import torch
from recorded_network import RecordedNetwork
from tiny import LLAMA3, MODELS, random_ids, rope_fields, tiny_checkpoint
from tiny_network import InterpretedDecoder, decoder_graph, real_network

from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.recipe import Recipe

RECIPES = {
    "float": Recipe("none"),
    "weight only, rotated": Recipe(activations=16, lm_head="bf16"),
    "weight only, INT8 head, exclusions": Recipe(
        activations=16,
        rotate=False,
        lm_head="int8",
        exclude=("transformer.layers.0.mlp.*", "*.1.attention.dense"),
    ),
    "plugin, rotated": Recipe(lm_head="bf16"),
    "plugin, 16-bit activations": Recipe(activations=16, lm_head="bf16"),
    "plugin, INT8 head, exclusions": Recipe(
        rotate=False, lm_head="int8", exclude=("transformer.layers.1.*", "*.0.mlp.proj")
    ),
}


WITHOUT_PLUGINS = [name for name in RECIPES if not name.startswith("plugin")]


def through_reference(model, caches, rows):
    """Logits of each sequence's new rows; the caches are extended."""
    states = model.hidden_states(list(zip(rows, caches, strict=True)))
    return [model.logits(part) for part in states.split([len(tokens) for tokens in rows])]


def check_decoding(config, recipe, tensors, atol, plugins=False):
    """Prefill, a ragged verify pass, a rollback and another one, in the network and in the reference model."""
    written = RecordedNetwork(trt) if plugins else real_network()
    network = InterpretedDecoder(decoder_graph(written, config, recipe, tensors, plugins=plugins), slots=3)
    model = ReferenceModel(config, recipe, tensors)
    caches = [model.new_cache() for _ in range(3)]
    lengths = [0, 0, 0]
    ids = iter(random_ids(config, 100, seed=5))
    # (new rows of each slot, how many of them stay)
    for counts, kept in (
        ((9, 4, 1), (9, 4, 1)),
        ((3, 5, 1), (1, 4, 1)),
        ((2, 1, 4), (2, 1, 2)),
        ((1, 1, 1), (1, 1, 1)),
    ):
        rows = [[next(ids) for _ in range(count)] for count in counts]
        found = network(rows, lengths, padding=1)
        expected = through_reference(model, caches, rows)
        for ours, theirs in zip(found, expected, strict=True):
            assert theirs.std() > 0.3
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
        lengths = [length + count for length, count in zip(lengths, kept, strict=True)]
        caches = [cache.first(length) for cache, length in zip(caches, lengths, strict=True)]
        for layer in range(config.num_hidden_layers):
            for kind, theirs in (("keys", "keys"), ("values", "values")):
                cached = network.caches[f"past_{kind}.{layer}"]
                for slot, length in enumerate(lengths):
                    expected_rows = getattr(caches[slot], theirs)[layer]
                    torch.testing.assert_close(cached[slot, :, :length], expected_rows, atol=atol, rtol=0)


@pytest.mark.parametrize("architecture", MODELS)
def test_network_decodes_as_the_reference_model(architecture):
    check_decoding(*tiny_checkpoint(architecture=architecture, num_hidden_layers=2), atol=2e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_network_of_every_recipe_decodes_as_the_reference_model(name):
    # A sum in another order may move an 8-bit code by one: 1/127 of a row's largest activation.
    atol = 0.05 if RECIPES[name].activations == 8 else 2e-3
    model = tiny_checkpoint(recipe=RECIPES[name], architecture="Qwen3ForCausalLM", attention_bias=True)
    check_decoding(*model, atol, plugins=name not in WITHOUT_PLUGINS)


def test_scaled_rope_and_a_tied_head_come_from_the_checkpoint():
    config, recipe, tensors = tiny_checkpoint(**rope_fields(**LLAMA3, rope_theta=1e4), tie_word_embeddings=True)
    check_decoding(config, recipe, tensors, atol=2e-4)


def test_bfloat16_network_stays_near_the_reference_model():
    config, recipe, tensors = tiny_checkpoint(recipe=Recipe(activations=16))
    graph = decoder_graph(real_network(), config, recipe, tensors, dtype="bfloat16")
    assert {tensor.dtype for tensor in graph.outputs} == {"BF16"}
    ids = random_ids(config, 24)
    (found,) = InterpretedDecoder(graph, slots=1)([ids], [0])
    expected = ReferenceModel(config, recipe, tensors)(ids)
    # some ten roundings of relative 2^-9 each on the way to the logits
    assert (found - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", WITHOUT_PLUGINS)
def test_double_records_what_the_real_network_holds(name, dtype):
    config, recipe, tensors = tiny_checkpoint(recipe=RECIPES[name], architecture="PanguEmbeddedForCausalLM")
    real = decoder_graph(real_network(), config, recipe, tensors, dtype=dtype)
    double = decoder_graph(RecordedNetwork(trt), config, recipe, tensors, dtype=dtype)
    assert real.inputs == double.inputs
    assert real.outputs == double.outputs
    for ours, theirs in zip(double.nodes, real.nodes, strict=True):
        assert dataclasses.replace(ours, constant=None) == dataclasses.replace(theirs, constant=None)
        if ours.kind == "CONSTANT":
            np.testing.assert_array_equal(ours.constant, theirs.constant)


def test_weights_are_not_copied():
    config, recipe, tensors = tiny_checkpoint(recipe=Recipe(activations=16))
    network = real_network()
    graph = decoder_graph(network, config, recipe, tensors)
    memory = {node.constant.ctypes.data for node in graph.nodes if node.constant is not None}
    matrices = [tensor for tensor in tensors.values() if tensor.ndim == 2 and len(tensor) > 1]
    assert {tensor.data_ptr() for tensor in matrices} <= memory
