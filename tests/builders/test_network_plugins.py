"""Every plugin layer that a network asks for is one that the plugins can be, with a kernel."""

from __future__ import annotations

import importlib

import pytest
import tensorrt_rtx
from recorded_network import RecordedNetwork
from tensorrt_double import DataType, plugin_layer, tensorrt_double
from tiny import tiny_checkpoint
from tiny_network import decoder_graph

from quasar_trt.recipe import Recipe

ROWS = 21


def plugin_layers(recipe):
    """(operation, inputs, attributes, outputs) of the layers that differ; -1 rows are "rows"."""
    config, recipe, tensors = tiny_checkpoint(recipe=recipe, architecture="Qwen2ForCausalLM", num_hidden_layers=1)
    network = RecordedNetwork(tensorrt_rtx)
    graph = decoder_graph(network, config, recipe, tensors, dtype="bfloat16", plugins=True)
    tensors = {output.name: output for node in graph.nodes for output in node.outputs}
    layers = {}
    for node in graph.nodes:
        if node.kind == "PLUGIN_V3":
            operation, attributes = node.attributes["operation"], node.attributes["attributes"]
            inputs, outputs = (
                [
                    (tuple("rows" if size == -1 else size for size in tensor.shape), DataType[tensor.dtype])
                    for tensor in described
                ]
                for described in ([tensors[name] for name in node.inputs], node.outputs)
            )
            layers[operation, str(inputs), str(attributes)] = operation, inputs, attributes, outputs
    return list(layers.values())


@pytest.mark.parametrize(
    "recipe", [Recipe(lm_head="bf16"), Recipe(activations=16, lm_head="int8")], ids=["8 bits", "16 bits"]
)
def test_plugins_take_the_layers_of_the_network(recipe):
    layers = plugin_layers(recipe)
    assert {operation for operation, *_ in layers} == {
        *("rms_norm_quantize", "smooth_quantize", "silu_mul_smooth_quantize"),
        *("linear", "linear_bias"),
    }
    with tensorrt_double() as plugin:
        importlib.import_module("quasar_trt.plugins.tensorrt")
        for operation, inputs, attributes, outputs in layers:
            tactic = 16 if operation.startswith("linear") else 0
            layer = plugin_layer(plugin, operation, inputs, attributes | {"sm": 80}, {"rows": ROWS}, tactic)
            expected = [(tuple(ROWS if size == "rows" else size for size in shape), kind) for shape, kind in outputs]
            assert layer.outputs == expected
            assert f".entry {layer.kernel}" in layer.ptx
