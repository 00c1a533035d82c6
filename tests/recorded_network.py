"""A double of INetworkDefinition that records layers, for machines and layers that the real one is not for.

It has the methods that the network writer calls, infers types and sizes as the real one does, and takes the operations of
`quasar_trt.plugins` as layers.
"""

from __future__ import annotations

import numpy as np

_KEEP = tuple(range(8))  # a shuffle that transposes nothing


class RecordedTensor:
    """values: of a constant or a shape, where they are known without running."""

    def __init__(self, name, dtype, shape, values=None):
        self.name = name
        self.dtype = dtype
        self.shape = tuple(shape)
        self.values = values


class RecordedLayer:
    """A layer whose outputs are inferred when they are first asked for, once its attributes are set."""

    def __init__(self, network, kind, inputs, infer, **attributes):
        self.type = getattr(network.trt.LayerType, kind)
        self.name = kind
        self.inputs = list(inputs)
        self._network = network
        self._infer = infer
        self._outputs = None
        for name, value in attributes.items():
            setattr(self, name, value)
        network.layers.append(self)

    @property
    def num_inputs(self):
        return len(self.inputs)

    @property
    def num_outputs(self):
        return len(self.outputs)

    @property
    def outputs(self):
        if self._outputs is None:
            described = self._infer(self)
            described = described if isinstance(described, list) else [described]
            self._outputs = [self._network.tensor(*parts) for parts in described]
        return self._outputs

    def get_input(self, index):
        return self.inputs[index]

    def set_input(self, index, tensor):
        self.inputs += [None] * (index + 1 - len(self.inputs))
        self.inputs[index] = tensor

    def get_output(self, index):
        return self.outputs[index]


def _broadcast(layer):
    x, y = layer.inputs
    assert len(x.shape) == len(y.shape) and x.dtype == y.dtype
    sizes = []
    for a, b in zip(x.shape, y.shape, strict=True):
        assert a == b or 1 in (a, b), (x.shape, y.shape)
        sizes.append(b if a == 1 else a)
    return x.dtype, sizes


def _shuffled(layer):
    x = layer.inputs[0]
    shape = [x.shape[axis] for axis in layer.first_transpose[: len(x.shape)]]
    wanted = layer.inputs[1].values if layer.num_inputs == 2 else layer.reshape_dims
    if layer.num_inputs == 1:
        wanted = [shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
        if -1 in wanted and -1 not in shape:
            rest = int(np.prod([size for size in wanted if size != -1]))
            wanted = [int(np.prod(shape)) // rest if size == -1 else size for size in wanted]
    return x.dtype, [wanted[axis] for axis in layer.second_transpose[: len(wanted)]]


def _gathered(layer):
    x, indices = layer.inputs
    return x.dtype, (*x.shape[: layer.axis], *indices.shape[layer.num_elementwise_dims :], *x.shape[layer.axis + 1 :])


def _sliced(layer):
    x = layer.inputs[0]
    sizes = dict(zip(layer.axes, layer.shape if layer.num_inputs == 1 else [-1], strict=True))
    return x.dtype, [sizes.get(axis, size) for axis, size in enumerate(x.shape)]


def _joined(layer):
    values = [tensor.values for tensor in layer.inputs]
    shape = list(layer.inputs[0].shape)
    shape[layer.axis] = sum(tensor.shape[layer.axis] for tensor in layer.inputs)
    return layer.inputs[0].dtype, shape, None if None in values else sum(values, ())


def _reduced(layer):
    (x,) = layer.inputs
    return x.dtype, [1 if layer.axes >> axis & 1 else size for axis, size in enumerate(x.shape)]


def _multiplied(layer):
    x, y = layer.inputs
    assert x.dtype == y.dtype and x.shape[:-2] == y.shape[:-2]
    inner, outer = y.shape[:-3:-1] if layer.op1.name == "TRANSPOSE" else y.shape[-2:]
    assert x.shape[-1] == inner
    return x.dtype, (*x.shape[:-1], outer)


def _same(layer):
    return layer.inputs[0].dtype, layer.inputs[0].shape


class RecordedNetwork:
    """trt: the module whose enumerations the layers carry."""

    def __init__(self, trt):
        self.trt = trt
        self.layers = []
        self._inputs = []
        self._outputs = []
        self._count = 0

    num_layers = property(lambda self: len(self.layers))
    num_inputs = property(lambda self: len(self._inputs))
    num_outputs = property(lambda self: len(self._outputs))

    def get_layer(self, index):
        return self.layers[index]

    def get_input(self, index):
        return self._inputs[index]

    def get_output(self, index):
        return self._outputs[index]

    def tensor(self, dtype, shape, values=None):
        self._count += 1
        return RecordedTensor(f"recorded {self._count}", dtype, shape, values)

    def mark_output(self, tensor):
        self._outputs.append(tensor)

    def add_input(self, name, dtype, shape):
        self._inputs.append(RecordedTensor(name, dtype, shape))
        return self._inputs[-1]

    def add_constant(self, shape, weights):
        array = weights.numpy()
        values = tuple(array.tolist()) if weights.dtype == self.trt.int64 else None
        return RecordedLayer(
            self, "CONSTANT", [], lambda layer: (weights.dtype, shape, values), shape=shape, weights=array
        )

    def add_cast(self, x, dtype):
        return RecordedLayer(self, "CAST", [x], lambda layer: (dtype, x.shape), to_type=dtype)

    def add_gather(self, x, indices, axis):
        mode = self.trt.GatherMode.DEFAULT
        return RecordedLayer(self, "GATHER", [x, indices], _gathered, axis=axis, mode=mode, num_elementwise_dims=0)

    def add_shuffle(self, x):
        attributes = {"first_transpose": _KEEP, "second_transpose": _KEEP, "zero_is_placeholder": True}
        return _Shuffle(self, "SHUFFLE", [x], _shuffled, **attributes)

    def add_slice(self, x, start, shape, stride):
        mode = self.trt.SampleMode.STRICT_BOUNDS
        return RecordedLayer(self, "SLICE", [x], _sliced, start=start, shape=shape, stride=stride, mode=mode)

    def add_shape(self, x):
        return RecordedLayer(self, "SHAPE", [x], lambda layer: (self.trt.int64, (len(x.shape),), x.shape))

    def add_concatenation(self, tensors):
        return RecordedLayer(self, "CONCATENATION", tensors, _joined, axis=None)

    def add_elementwise(self, x, y, operation):
        return RecordedLayer(self, "ELEMENTWISE", [x, y], _broadcast, op=operation)

    def add_unary(self, x, operation):
        return RecordedLayer(self, "UNARY", [x], _same, op=operation)

    def add_activation(self, x, function):
        return RecordedLayer(self, "ACTIVATION", [x], _same, function=function)

    def add_reduce(self, x, operation, axes, keep_dims):
        assert keep_dims
        return RecordedLayer(self, "REDUCE", [x], _reduced, op=operation, axes=axes, keep_dims=keep_dims)

    def add_matrix_multiply(self, x, op0, y, op1):
        return RecordedLayer(self, "MATRIX_MULTIPLY", [x, y], _multiplied, op0=op0, op1=op1)

    def add_dequantize(self, x, scale, dtype):
        return RecordedLayer(self, "DEQUANTIZE", [x, scale], lambda layer: (dtype, x.shape), to_type=dtype, axis=-1)

    def add_quantize(self, x, scale, dtype):
        assert x.dtype == scale.dtype == self.trt.float32 and scale.shape == ()
        return RecordedLayer(self, "QUANTIZE", [x, scale], lambda layer: (dtype, x.shape), to_type=dtype, axis=-1)

    def add_topk(self, x, operation, count, axes):
        (axis,) = (axis for axis in range(len(x.shape)) if axes >> axis & 1)
        shape = [count if i == axis else size for i, size in enumerate(x.shape)]
        infer = lambda layer: [(x.dtype, shape), (self.trt.int32, shape)]  # noqa: E731
        return RecordedLayer(self, "TOPK", [x], infer, op=operation, k=count, axes=axes)

    def add_scatter(self, x, indices, values, mode):
        assert x.dtype == values.dtype and indices.shape == values.shape
        return RecordedLayer(self, "SCATTER", [x, indices, values], _same, mode=mode, axis=0)

    def add_dist_collective(self, x, operation, reduction, root, groups):
        assert root == -1 and not groups
        gathers = operation == self.trt.CollectiveOperation.ALL_GATHER
        infer = lambda layer: (x.dtype, (-1, *x.shape[1:]) if gathers else x.shape)  # noqa: E731
        return RecordedLayer(self, "DIST_COLLECTIVE", [x], infer, num_ranks=1)

    def add_rotary_embedding(self, x, cos, sin, interleaved, size):
        attributes = {"interleaved": interleaved, "rotary_embedding_dim": size}
        return RecordedLayer(self, "ROTARY_EMBEDDING", [x, cos, sin], _same, **attributes)

    def add_kv_cache_update(self, cache, update, start, mode):
        form = self.trt.AttentionIOForm.PADDED_BHND
        assert cache.dtype == update.dtype
        return RecordedLayer(self, "KV_CACHE_UPDATE", [cache, update, start], _same, cache_mode=mode, update_form=form)

    def add_attention_v2(self, queries, keys, values, norm_op, causal_kind):
        assert queries.dtype == keys.dtype == values.dtype
        return _Attention(self, [queries, keys, values], norm_op, causal_kind)

    def add_plugin(self, described, aot):
        """described: (operation below `quasar::`, inputs, attributes); types and sizes as `quasar_trt.plugins.tensorrt` says."""
        operation, inputs, attributes = described
        assert aot
        return RecordedLayer(
            self, "PLUGIN_V3", inputs, self._plugin_outputs, operation=operation, attributes=attributes
        )

    def _plugin_outputs(self, layer):
        trt, x = self.trt, layer.inputs[0]
        if layer.operation.startswith("linear"):
            dtype = {"bfloat16": trt.bfloat16, "float32": trt.float32}[layer.attributes["output"]]
            return dtype, (x.shape[0], layer.inputs[2].shape[0])
        codes = (x.shape[0], x.shape[1] * layer.attributes["activations"] // 8)
        return [(trt.int8, codes), (trt.float32, x.shape[:1])]


class _Shuffle(RecordedLayer):
    reshape_dims = None


class _Attention:
    """Two layers, as the real one: what it reads, and what it gives."""

    def __init__(self, network, inputs, norm_op, causal_kind):
        self.norm_op = norm_op
        self.causal_kind = causal_kind
        self.decomposable = False
        self.query_form = self.key_value_form = network.trt.AttentionIOForm.PADDED_BHND
        self._first = RecordedLayer(network, "ATTENTION_INPUT", inputs, _same, attention=self)
        self._last = RecordedLayer(network, "ATTENTION_OUTPUT", [None], _same)

    def _set_mask(self, tensor):
        self._first.inputs.append(tensor)

    mask = property(None, _set_mask)

    def get_output(self, index):
        self._last.inputs = [self._first.get_output(0)]
        return self._last.get_output(index)
