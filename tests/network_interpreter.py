"""Computes a network read by `network_graph` in torch, layer by layer, as its types say; caches are updated in place."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence

import torch
from network_graph import Graph, Node
from torch import Tensor

from quasar_trt.plugins import reference as ops

DTYPES = {
    "FLOAT": torch.float32,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}
_ELEMENTWISE = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "DIV": torch.div,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _constant(node: Node) -> Tensor:
    (output,) = node.outputs
    array = torch.from_numpy(node.constant.copy())
    return (array.view(torch.bfloat16) if output.dtype == "BF16" else array).reshape(output.shape)


def _shuffle(node: Node, x: Tensor, shape: Tensor | None = None) -> Tensor:
    x = x.permute(node.attributes["first_transpose"])
    if shape is not None:
        sizes = shape.tolist()
    else:
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(node.attributes["reshape_dims"])]
    return x.reshape(sizes).permute(node.attributes["second_transpose"])


def _slice(node: Node, x: Tensor, start: None = None, shape: Tensor | None = None) -> Tensor:
    axes, starts, counts, strides = (node.attributes[name] for name in ("axes", "start", "shape", "stride"))
    counts = counts if shape is None else shape.tolist()
    for axis, start, count, stride in zip(axes, starts, counts, strides, strict=True):  # noqa: PLR1704
        assert stride == 1 and start + count <= x.shape[axis]
        x = x.narrow(axis, start, count)
    return x


def _gather(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    axis = node.attributes["axis"]
    assert node.attributes["mode"] == "DEFAULT" and 0 <= int(indices.min()) <= int(indices.max()) < x.shape[axis]
    if not node.attributes["num_elementwise_dims"]:
        assert axis == 0
        return x[indices.long()]
    assert indices.ndim == 2
    return torch.stack([each.index_select(axis - 1, picked) for each, picked in zip(x, indices, strict=True)])


def _reduce(node: Node, x: Tensor) -> Tensor:
    assert node.attributes["op"] == "AVG" and node.attributes["keep_dims"]
    axes = [axis for axis in range(x.ndim) if node.attributes["axes"] >> axis & 1]
    return x.mean(dim=axes, keepdim=True)


def _matrix_multiply(node: Node, x: Tensor, y: Tensor) -> Tensor:
    assert node.attributes["op0"] == "NONE"
    return x @ (y.mT if node.attributes["op1"] == "TRANSPOSE" else y)


def _quantize(node: Node, x: Tensor, scale: Tensor) -> Tensor:
    assert scale.ndim == 0 and node.attributes["to_type"] == "INT8"
    return torch.round(x / scale).clamp(-128, 127)


def _dequantize(node: Node, codes: Tensor, scale: Tensor) -> Tensor:
    if scale.ndim:
        assert node.attributes["axis"] == 0
        scale = scale[:, None]
    return (codes.float() * scale).to(DTYPES[node.attributes["to_type"]])


def _top(node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of equal values the first; TensorRT promises no order."""
    assert node.attributes["op"] == "MAX" and node.attributes["axes"] == 2
    values, indices = x.sort(dim=1, descending=True, stable=True)
    return values[:, : node.attributes["k"]], indices[:, : node.attributes["k"]]


def _scatter(node: Node, x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    assert node.attributes["mode"] == "ELEMENT" and node.attributes["axis"] == 1
    return x.scatter(1, indices.long(), values)


def _rotary_embedding(node: Node, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    assert not node.attributes["interleaved"] and node.attributes["rotary_embedding_dim"] == 0
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _kv_cache_update(node: Node, cache: Tensor, update: Tensor, starts: Tensor) -> Tensor:
    assert node.attributes["cache_mode"] == "LINEAR"
    for slot, rows, start in zip(cache, update, starts.tolist(), strict=True):
        assert start + rows.shape[1] <= slot.shape[1], "written behind the capacity"
        slot[:, start : start + rows.shape[1]] = rows
    return cache


def _attention(node: Node, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """As TensorRT-RTX adds the mask: what has become NaN stays so."""
    assert node.attributes["causal_kind"] == "NONE" and node.attributes["norm_op"] == "SOFTMAX"
    batch, heads, rows, size = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], -1, rows, size).float()
    scores = grouped @ keys[:, :, None].float().mT
    mask = torch.zeros(visible.shape).masked_fill(~visible, -math.inf)
    weights = (scores + mask[:, :, None]).softmax(dim=-1)
    return (weights @ values[:, :, None].float()).reshape(batch, heads, rows, size)


def _plugin(node: Node, x: Tensor, *inputs: Tensor) -> tuple[Tensor, ...] | Tensor:
    """16-bit codes are INT8 in pairs between the layers."""
    operation, attributes = node.attributes["operation"], node.attributes["attributes"]
    bits = attributes["activations"]
    if operation in ("linear", "linear_bias"):
        assert len(inputs) == (4 if operation == "linear_bias" else 3)
        return ops.LINEAR[bits](x if bits == 8 else x.view(torch.int16), *inputs)
    if operation == "rms_norm_quantize":
        codes, scale = ops.QUANTIZE[bits](ops.rms_norm(x, *inputs, attributes["eps"]))
    else:
        codes, scale = getattr(ops, operation)(x, *inputs, attributes["hadamard"], bits)
    return codes.view(torch.int8), scale


_COMPUTE = {
    "CAST": lambda node, x: x,  # to the type of the output, as every result
    "GATHER": _gather,
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SHAPE": lambda node, x: torch.tensor(x.shape),
    "CONCATENATION": lambda node, *tensors: torch.cat(tensors, dim=node.attributes["axis"]),
    "ELEMENTWISE": lambda node, x, y: _ELEMENTWISE[node.attributes["op"]](x, y),
    "UNARY": lambda node, x: {"SQRT": torch.sqrt}[node.attributes["op"]](x),
    "ACTIVATION": lambda node, x: {"SIGMOID": torch.sigmoid}[node.attributes["function"]](x),
    "REDUCE": _reduce,
    "MATRIX_MULTIPLY": _matrix_multiply,
    "QUANTIZE": _quantize,
    "DEQUANTIZE": _dequantize,
    "TOPK": _top,
    "SCATTER": _scatter,
    "ROTARY_EMBEDDING": _rotary_embedding,
    "KV_CACHE_UPDATE": _kv_cache_update,
    "ATTENTION_INPUT": _attention,
    "ATTENTION_OUTPUT": lambda node, x: x,
    "PLUGIN_V3": _plugin,
}
# Operation of a collective layer -> what it makes of the tensors of all ranks.
COLLECTIVES = {"ALL_REDUCE": sum, "ALL_GATHER": torch.cat}


class Interpreter:
    """A network to run any number of times; its constants are made once."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._constants = {node.outputs[0].name: _constant(node) for node in graph.nodes if node.kind == "CONSTANT"}

    def __call__(self, bindings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """bindings: the inputs by name, of the types and sizes that the network declares; those that a cache update reads
        are written. Returns the outputs by name."""
        (outputs,) = run_ranks([self], [bindings])
        return outputs

    def steps(self, bindings: Mapping[str, Tensor]) -> Generator[tuple[str, Tensor], Tensor, dict[str, Tensor]]:
        """As a call; yields (operation, this rank's tensor) at each collective layer, and is sent the result."""
        assert bindings.keys() == {tensor.name for tensor in self.graph.inputs}
        for declared in self.graph.inputs:
            found = bindings[declared.name]
            assert found.dtype == DTYPES[declared.dtype], declared
            assert _matches(found.shape, declared.shape), (declared, found.shape)
        tensors: dict[str | None, Tensor | None] = self._constants | dict(bindings) | {None: None}
        for node in self.graph.nodes:
            if node.kind == "CONSTANT":
                continue
            inputs = [tensors[name] for name in node.inputs]
            if node.kind == "DIST_COLLECTIVE":
                results = yield node.attributes["metadata"], *inputs
            else:
                results = _COMPUTE[node.kind](node, *inputs)
            results = results if isinstance(results, tuple) else (results,)
            for output, result in zip(node.outputs, results, strict=True):
                assert _matches(result.shape, output.shape), (node, result.shape)
                tensors[output.name] = result.to(DTYPES[output.dtype])
        return {output.name: tensors[output.name] for output in self.graph.outputs}


def run_ranks(ranks: Sequence[Interpreter], bindings: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The outputs of all ranks of one network, each up to the next collective layer in turn."""
    running = [rank.steps(given) for rank, given in zip(ranks, bindings, strict=True)]
    result = None
    while True:
        parts, outputs = [], []
        for steps in running:
            try:
                parts.append(steps.send(result))
            except StopIteration as finished:
                outputs.append(finished.value)
        if outputs:
            assert not parts
            return outputs
        ((operation, *_), *others), tensors = parts, [tensor for _, tensor in parts]
        assert all(other == operation for other, _ in others)
        result = COLLECTIVES[operation](tensors)


def _matches(found, declared) -> bool:
    return len(found) == len(declared) and all(want in (-1, size) for size, want in zip(found, declared, strict=True))
