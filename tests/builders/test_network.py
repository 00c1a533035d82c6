"""The decoder's network, executed: what it computes is what the reference model computes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorrt_rtx as trt
import torch
from ranks import SIZES, forward, shards
from recorded_network import RecordedNetwork
from tiny import LLAMA3, MODELS, random_ids, rope_fields, tiny_checkpoint
from tiny_network import InterpretedDecoder, decoder_graph, real_network

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.engines.plan_bindings import state_places
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config

RECIPES = {
    "float": Recipe("none"),
    "weight only, rotated": Recipe(activations=16, lm_head="bf16"),
    "weight only, INT8 head, exclusions": Recipe(
        activations=16,
        rotate=False,
        lm_head="int8",
        exclude=("transformer.layers.0.mlp.*", "*.1.attention.dense"),
    ),
    "weight only, rescored head": Recipe(activations=16, rotate=False),
    "static, rotated": Recipe(static_activations=True, lm_head="bf16"),
    "static, INT8 head, fallback, exclusions": Recipe(
        static_activations=True,
        smoothquant=0.5,
        lm_head="int8",
        weight_only=("transformer.layers.0.mlp.proj", "transformer.layers.2.attention.qkv"),
        exclude=("transformer.layers.1.mlp.*",),
    ),
    "plugin, rotated": Recipe(lm_head="bf16"),
    "plugin, rescored head": Recipe(activations=16),
    "plugin, 16-bit activations": Recipe(activations=16, lm_head="bf16"),
    "plugin, INT8 head, exclusions": Recipe(
        rotate=False, lm_head="int8", exclude=("transformer.layers.1.*", "*.0.mlp.proj")
    ),
}


WITHOUT_PLUGINS = [name for name in RECIPES if not name.startswith("plugin")]


def through_reference(model, caches, rows, parents, places):
    """Logits of each sequence's new rows, and their hidden states by place; the caches are extended."""
    kept = dict.fromkeys(places)
    states = model.hidden_states(list(zip(rows, caches, strict=True)), parents, kept)
    counts = [len(tokens) for tokens in rows]
    logits = [model.logits(part) for part in states.split(counts)]
    return logits, {place: found.split(counts) for place, found in kept.items()}


def check_decoding(config, recipe, tensors, atol, plugins=False, tp_size=1):
    """Prefill, ragged verify passes of chains and trees, a rollback and another one, in the networks of all ranks and in the reference
    model: logits, hidden states and caches."""
    graphs = [
        decoder_graph(
            RecordedNetwork(trt) if plugins else real_network(),
            rank_config(config, tp_size),
            recipe,
            part,
            plugins=plugins,
        )
        for part in shards(config, tensors, tp_size)
    ]
    network = InterpretedDecoder(*graphs, slots=3)
    places = state_places(rank_config(config, tp_size))
    model = ReferenceModel(config, recipe, tensors)
    caches = [model.new_cache() for _ in range(3)]
    lengths = [0, 0, 0]
    ids = iter(random_ids(config, 100, seed=6))
    # (new rows of each slot, how many of them stay, the parents of those of a tree)
    for counts, kept, parents in (
        ((9, 4, 1), (9, 4, 1), {}),
        ((3, 5, 1), (1, 4, 1), {}),
        ((2, 6, 4), (1, 2, 1), {1: (-1, -1, 0, 0, 1), 2: (-1, 0, -1)}),
        ((2, 1, 4), (2, 1, 2), {}),
        ((1, 1, 1), (1, 1, 1), {}),
    ):
        rows = [[next(ids) for _ in range(count)] for count in counts]
        found = network(rows, lengths, padding=1, parents=parents)
        expected, states = through_reference(model, caches, rows, [parents.get(slot, ()) for slot in range(3)], places)
        for ours, theirs in zip(found, expected, strict=True):
            assert theirs.std() > 0.3
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
        assert network.states.keys() == states.keys()
        for place, of_slots in states.items():
            for ours, theirs in zip(network.states[place], of_slots, strict=True):
                largest = max(1, theirs.abs().max().item())
                torch.testing.assert_close(ours[: len(theirs)], theirs, atol=largest * atol, rtol=0)
        lengths = [length + count for length, count in zip(lengths, kept, strict=True)]
        caches = [cache.first(length) for cache, length in zip(caches, lengths, strict=True)]
        for layer in range(config.num_hidden_layers):
            for kind, theirs in (("keys", "keys"), ("values", "values")):
                cached = torch.cat([caches[f"past_{kind}.{layer}"] for caches in network.caches], dim=1)
                for slot, length in enumerate(lengths):
                    expected_rows = getattr(caches[slot], theirs)[layer]
                    torch.testing.assert_close(cached[slot, :, :length], expected_rows, atol=atol, rtol=0)


@pytest.mark.parametrize("architecture", MODELS)
def test_network_decodes_as_the_reference_model(architecture):
    check_decoding(*tiny_checkpoint(architecture=architecture, num_hidden_layers=2), atol=2e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_network_of_every_recipe_decodes_as_the_reference_model(name):
    # A sum in another order may move an 8-bit code by one: 1/127 of a row's largest activation, or of the largest in calibration,
    # where the reference model's 16-bit codes, which the network does not round to, move more of them.
    recipe = RECIPES[name]
    atol = 0.15 if recipe.weight_only else 0.05 if recipe.activations == 8 else 2e-3
    model = tiny_checkpoint(recipe=RECIPES[name], architecture="Qwen3ForCausalLM", attention_bias=True)
    check_decoding(*model, atol, plugins=name not in WITHOUT_PLUGINS)


@pytest.mark.parametrize("name", ["float", "weight only, rotated", "plugin, INT8 head, exclusions"])
def test_a_deep_network_gives_the_states_that_published_heads_read(name):
    config, recipe, tensors = tiny_checkpoint(recipe=RECIPES[name], num_hidden_layers=9)
    assert state_places(config) == (2, 4, 6, 9)
    check_decoding(
        config, recipe, tensors, {None: 5e-4, 16: 4e-3, 8: 0.1}[recipe.activations], name.startswith("plugin")
    )


@pytest.mark.parametrize(
    ("architecture", "tp_size", "name"),
    [
        ("PanguEmbeddedForCausalLM", 2, "float"),
        ("Qwen3ForCausalLM", 3, "float"),
        ("PanguEmbeddedForCausalLM", 2, "weight only, INT8 head, exclusions"),
        ("LlamaForCausalLM", 3, "static, rotated"),  # three ranks have the Hadamard blocks of one
    ],
)
def test_ranks_together_decode_as_the_reference_model(architecture, tp_size, name):
    config, recipe, tensors = tiny_checkpoint(recipe=RECIPES[name], architecture=architecture, **SIZES)
    atol = {None: 2e-4, 16: 2e-3, 8: 0.05}[recipe.activations]
    check_decoding(config, recipe, tensors, atol, tp_size=tp_size)


@pytest.mark.parametrize("tp_size", [2, 3])
def test_ranks_with_plugins_quantize_their_own_shares(tp_size):
    recipe = RECIPES["plugin, INT8 head, exclusions"]
    config, recipe, tensors = tiny_checkpoint(recipe=recipe, architecture="PanguEmbeddedForCausalLM", **SIZES)
    rank, parts = rank_config(config, tp_size), shards(config, tensors, tp_size)
    graphs = [decoder_graph(RecordedNetwork(trt), rank, recipe, part, plugins=True) for part in parts]
    ids = random_ids(config, 20)
    (found,) = InterpretedDecoder(*graphs, slots=1)([ids], [0])
    expected = forward(rank, recipe, parts, hadamard_blocks(rank, recipe), ids)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)


def test_ranks_rescore_the_best_of_their_own_shares():
    def decoded(head: str, tp_size: int) -> torch.Tensor:
        recipe = Recipe(activations=16, rotate=False, lm_head=head)
        config, recipe, tensors = tiny_checkpoint(recipe=recipe, vocab_size=301)
        parts = shards(config, tensors, tp_size)
        graphs = [decoder_graph(real_network(), rank_config(config, tp_size), recipe, part) for part in parts]
        (logits,) = InterpretedDecoder(*graphs, slots=1)([random_ids(config, 8)], [0])
        return logits

    found, bf16, int8 = decoded("rescored", 2), decoded("bf16", 1), decoded("int8", 1)
    for share in (slice(0, 151), slice(151, 301)):  # the second has a row of padding
        best = int8[:, share].topk(64).indices
        expected = int8[:, share].scatter(1, best, bf16[:, share].gather(1, best))
        torch.testing.assert_close(found[:, share], expected, atol=1e-3, rtol=0)


def test_scaled_rope_and_a_tied_head_come_from_the_checkpoint():
    config, recipe, tensors = tiny_checkpoint(**rope_fields(**LLAMA3, rope_theta=1e4), tie_word_embeddings=True)
    check_decoding(config, recipe, tensors, atol=2e-4)


@pytest.mark.parametrize(
    ("recipe", "copies"),
    [
        (Recipe("none"), 1),
        (Recipe(activations=16, rotate=False, lm_head="rescored"), 2),  # one of them the INT8 head
        (Recipe(activations=16, lm_head="bf16"), 2),  # which rotation unties
    ],
)
def test_a_tied_head_is_the_embedding_once(recipe, copies):
    config, recipe, tensors = tiny_checkpoint(recipe=recipe, tie_word_embeddings=True)
    graph = decoder_graph(real_network(), config, recipe, tensors)
    shapes = [node.outputs[0].shape for node in graph.nodes if node.kind == "CONSTANT"]
    assert shapes.count((config.vocab_size, config.hidden_size)) == copies


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
    check_double(*tiny_checkpoint(recipe=RECIPES[name], architecture="PanguEmbeddedForCausalLM"), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_double_records_the_real_network_of_a_rank(dtype):
    recipe = Recipe(activations=16, rotate=False)
    config, recipe, tensors = tiny_checkpoint(recipe=recipe, architecture="PanguEmbeddedForCausalLM", **SIZES)
    check_double(rank_config(config, 2), recipe, shards(config, tensors, 2)[1], dtype)


def check_double(config, recipe, tensors, dtype):
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
