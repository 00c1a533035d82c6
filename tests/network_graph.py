"""Reads a network definition, of TensorRT or of the recording double, back into plain nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Type of a layer -> (class that shows its attributes, the attributes that matter).
_LAYERS = {
    "CONSTANT": ("IConstantLayer", ("shape",)),
    "CAST": ("ICastLayer", ("to_type",)),
    "GATHER": ("IGatherLayer", ("axis", "mode", "num_elementwise_dims")),
    "SHUFFLE": ("IShuffleLayer", ("first_transpose", "second_transpose", "zero_is_placeholder")),
    "SLICE": ("ISliceLayer", ("axes", "start", "shape", "stride", "mode")),
    "SHAPE": ("IShapeLayer", ()),
    "CONCATENATION": ("IConcatenationLayer", ("axis",)),
    "ELEMENTWISE": ("IElementWiseLayer", ("op",)),
    "UNARY": ("IUnaryLayer", ("op",)),
    "ACTIVATION": ("IActivationLayer", ()),  # its `type` is the function
    "REDUCE": ("IReduceLayer", ("op", "axes", "keep_dims")),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", ("op0", "op1")),
    "QUANTIZE": ("IQuantizeLayer", ("axis", "to_type")),
    "DEQUANTIZE": ("IDequantizeLayer", ("axis", "to_type")),
    "TOPK": ("ITopKLayer", ("op", "k", "axes")),
    "SCATTER": ("IScatterLayer", ("axis", "mode")),
    "DIST_COLLECTIVE": ("IDistCollectiveLayer", ("num_ranks", "metadata")),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", ("interleaved", "rotary_embedding_dim")),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", ("cache_mode", "update_form")),
    "ATTENTION_INPUT": ("IAttentionInputLayer", ()),  # what it says is of the attention it begins
    "ATTENTION_OUTPUT": ("IAttentionOutputLayer", ()),
    "PLUGIN_V3": (None, ("operation", "attributes")),
}
_ATTENTION = ("norm_op", "causal_kind", "decomposable", "query_form", "key_value_form")


@dataclass(frozen=True)
class Tensor:
    """A tensor as a network declares it. dtype: member of DataType, by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """A layer. inputs and outputs: names of tensors, None where an optional input is absent."""

    kind: str
    inputs: tuple[str | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: dict[str, object]
    constant: np.ndarray | None = None


@dataclass(frozen=True)
class Graph:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    nodes: tuple[Node, ...]


def read_graph(trt, network, constants: Sequence[np.ndarray]) -> Graph:
    """constants: the arrays of the constant layers in order, because the API shows no values of bfloat16; the values of all
    others must equal them. Tensors are renamed by their place, but for inputs and outputs."""
    inputs = tuple(_tensor(network.get_input(i)) for i in range(network.num_inputs))
    outputs = tuple(_tensor(network.get_output(i)) for i in range(network.num_outputs))
    names = {tensor.name: tensor.name for tensor in (*inputs, *outputs)}
    remaining = iter(constants)
    nodes = tuple(_node(trt, network.get_layer(i), names, remaining) for i in range(network.num_layers))
    assert next(remaining, None) is None, "fewer constant layers than constants"
    return Graph(inputs, outputs, nodes)


def _tensor(tensor) -> Tensor:
    return Tensor(tensor.name, tensor.dtype.name, tuple(tensor.shape))


def _node(trt, layer, names: dict[str, str], constants) -> Node:
    kind = layer.type.name
    shown_as, wanted = _LAYERS[kind]
    inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
    outputs = [_tensor(layer.get_output(i)) for i in range(layer.num_outputs)]
    for output in outputs:
        names.setdefault(output.name, f"t{len(names)}")
    if type(layer).__module__ == trt.ILayer.__module__ and shown_as:
        layer.__class__ = getattr(trt, shown_as)
    attributes = {name: _plain(getattr(layer, name)) for name in wanted}
    constant = None
    if kind == "CONSTANT":
        constant = next(constants)
        weights = layer.weights
        assert weights.size == constant.size
        if not isinstance(weights, np.ndarray):
            assert weights.dtype.name == "BF16" and constant.dtype == np.uint16
        else:
            assert weights.dtype == constant.dtype and np.array_equal(weights.ravel(), constant.ravel())
    elif kind == "SHUFFLE":  # of the orders, what belongs to axes that are there
        attributes["first_transpose"] = attributes["first_transpose"][: len(inputs[0].shape)]
        attributes["second_transpose"] = attributes["second_transpose"][: len(outputs[0].shape)]
        attributes["reshape_dims"] = _plain(layer.reshape_dims) if layer.num_inputs == 1 else None
    elif kind == "SLICE" and len(inputs) == 3:
        attributes["shape"] = None  # an input has it
    elif kind == "ACTIVATION":
        attributes["function"] = _plain(layer.function if hasattr(layer, "function") else layer.type)
    elif kind == "ATTENTION_INPUT":
        attributes |= {name: _plain(getattr(layer.attention, name)) for name in _ATTENTION}
    return Node(
        kind,
        tuple(tensor and names[tensor.name] for tensor in inputs),
        tuple(Tensor(names[output.name], output.dtype, output.shape) for output in outputs),
        attributes,
        constant,
    )


def _plain(value):
    """Enumerations by name, sequences of numbers as tuples."""
    if isinstance(value, bool | int | float | str | dict) or value is None:
        return value
    return value.name if hasattr(value, "name") else tuple(value)
