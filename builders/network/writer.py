"""A thin writer over a TensorRT network definition: one method per operation that the decoder is made of.

`tensorrt` and `tensorrt_rtx` have the same network API, so which of them writes is a matter of the module handed in. Tests
hand in a recording network instead, which also takes plugin layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# Names of types as torch and numpy spell them -> members of DataType.
_DTYPES = {"bfloat16": "BF16", "float32": "FLOAT", "int32": "INT32", "int64": "INT64", "int8": "INT8", "bool": "BOOL"}
# (network, operation below `quasar::`, input tensors, attributes) -> output tensors
AddPlugin = Callable[[object, str, Sequence[object], dict], Sequence[object]]


class NetworkWriter:
    """Writes layers into `network`, a strongly typed INetworkDefinition of the module `trt`.

    Tensors are the network's own ITensor. Elementwise operations want operands of one rank; sizes of 1 are broadcast.
    add_plugin: how the operations of `quasar_trt.plugins` become layers, or None where there are no plugins.
    """

    def __init__(self, trt, network, add_plugin: AddPlugin | None = None):
        self._trt = trt
        self._network = network
        self._add_plugin = add_plugin
        self.constants: list[np.ndarray] = []  # in order; the network refers to their memory until it is compiled
        self._of_memory: dict[tuple, object] = {}
        self._scalars: dict[tuple[float, int], object] = {}

    def input(self, name: str, dtype: str, shape: Sequence[int]):
        """An input binding; -1 is a size that each pass chooses."""
        return self._network.add_input(name, self._dtype(dtype), tuple(shape))

    def output(self, name: str, tensor) -> None:
        tensor.name = name
        self._network.mark_output(tensor)

    def constant(self, array: np.ndarray, shape: Sequence[int] | None = None):
        """A constant that refers to the memory of `array`, contiguous; uint16 stands for the bits of bfloat16. What has the same
        memory and shape is one constant."""
        shape = array.shape if shape is None else tuple(shape)
        key = array.ctypes.data, shape
        if key not in self._of_memory:
            name = "bfloat16" if array.dtype == np.uint16 else str(array.dtype)
            self.constants.append(array)
            weights = self._trt.Weights(self._dtype(name), array.ctypes.data, array.size)
            self._of_memory[key] = self._out(self._network.add_constant(shape, weights))
        return self._of_memory[key]

    def scalar(self, value: float, rank: int):
        """A float32 constant that broadcasts over tensors of this rank; the same is one constant."""
        if (value, rank) not in self._scalars:
            self._scalars[value, rank] = self.constant(np.full((1,) * rank, value, np.float32))
        return self._scalars[value, rank]

    def cast(self, x, dtype: str):
        """x itself where it has this dtype already."""
        return x if x.dtype == self._dtype(dtype) else self._out(self._network.add_cast(x, self._dtype(dtype)))

    def gather(self, x, indices):
        """Slices of x along its first axis."""
        return self._out(self._network.add_gather(x, indices, 0))

    def gather_columns(self, x, indices):
        """Columns of x [batch, 1, rows, columns], of each of the batch those that indices, int32 [batch, count], name:
        [batch, 1, rows, count]."""
        layer = self._network.add_gather(x, indices, 3)
        layer.num_elementwise_dims = 1
        return self._out(layer)

    def reshape(self, x, shape: Sequence[int]):
        """0 keeps the size of that axis, -1 is what remains."""
        layer = self._network.add_shuffle(x)
        layer.reshape_dims = tuple(shape)
        return self._out(layer)

    def part(self, x, start: int, count: int):
        """Columns of x [rows, columns], heads of x [batch, heads, rows, size]."""
        return self._part(x, 1, start, count)

    def join_heads(self, tensors):
        """Tensors [batch, heads, rows, size] as one."""
        return self._joined(tensors, 1)

    def first_rows(self, x, count):
        """The first rows of x [..., capacity, size], as many as the input `count`, int64 [1], says."""
        axis = len(x.shape) - 2
        layer = self._network.add_slice(x, (0,), (x.shape[axis],), (1,))
        layer.axes = (axis,)
        layer.set_input(2, count)
        return self._out(layer)

    def shape(self, x):
        """The sizes of x, int64 [rank]."""
        return self._out(self._network.add_shape(x))

    def size(self, shape, axis: int):
        """The size of an axis, int32 [1, 1]; shape: as the method gives it."""
        return self.reshape(self.cast(self._part(shape, 0, axis, 1), "int32"), (1, 1))

    def head_sizes(self, batch_and_rows, heads: int, size: int):
        """int64 [4]: batch, rows, heads, size, of batch_and_rows int64 [2]."""
        return self._joined([batch_and_rows, self.constant(np.array([heads, size], np.int64))], 0)

    def to_heads(self, x, sizes):
        """x [batch * rows, heads * size] -> [batch, heads, rows, size], by `head_sizes`."""
        layer = self._network.add_shuffle(x)
        layer.set_input(1, sizes)
        layer.second_transpose = (0, 2, 1, 3)
        return self._out(layer)

    def from_heads(self, x, columns: int):
        """x [batch, heads, rows, size] -> [batch * rows, columns = heads * size]."""
        layer = self._network.add_shuffle(x)
        layer.first_transpose = (0, 2, 1, 3)
        layer.reshape_dims = (-1, columns)
        return self._out(layer)

    def add(self, x, y):
        return self._elementwise(x, y, "SUM")

    def subtract(self, x, y):
        return self._elementwise(x, y, "SUB")

    def smaller(self, x, y):
        return self._elementwise(x, y, "MIN")

    def larger(self, x, y):
        return self._elementwise(x, y, "MAX")

    def multiply(self, x, y):
        return self._elementwise(x, y, "PROD")

    def divide(self, x, y):
        return self._elementwise(x, y, "DIV")

    def square_root(self, x):
        return self._out(self._network.add_unary(x, self._trt.UnaryOperation.SQRT))

    def sigmoid(self, x):
        return self._out(self._network.add_activation(x, self._trt.ActivationType.SIGMOID))

    def mean(self, x, axis: int):
        """The mean over one axis, which stays with size 1."""
        return self._out(self._network.add_reduce(x, self._trt.ReduceOperation.AVG, 1 << axis, True))

    def multiply_matrices(self, x, y, transpose: bool = False):
        """x @ y, or x @ y.T; leading axes are a batch."""
        kinds = self._trt.MatrixOperation
        kind = kinds.TRANSPOSE if transpose else kinds.NONE
        return self._out(self._network.add_matrix_multiply(x, kinds.NONE, y, kind))

    def quantize(self, x, scale):
        """round(x / scale), int8, x and scale float32; halves to even, clipped to -128 .. 127. scale: a constant without axes."""
        return self._out(self._network.add_quantize(x, scale, self._trt.DataType.INT8))

    def dequantize(self, codes, scale, dtype: str):
        """codes int8 * scale float32, a constant without axes, as `dtype`."""
        return self._out(self._network.add_dequantize(codes, scale, self._dtype(dtype)))

    def dequantize_rows(self, codes, scale, dtype: str):
        """codes int8 [n, k] * scale float32 [n] of each row, as `dtype`."""
        layer = self._network.add_dequantize(codes, scale, self._dtype(dtype))
        layer.axis = 0
        return self._out(layer)

    def top_indices(self, x, count: int):
        """The columns of the largest `count` values of each row of x [rows, columns], int32 [rows, count]."""
        layer = self._network.add_topk(x, self._trt.TopKOperation.MAX, count, 1 << 1)
        return layer.get_output(1)

    def replace_columns(self, x, columns, values):
        """x [rows, columns] with values [rows, count] at columns, int32 [rows, count], of the same row."""
        layer = self._network.add_scatter(x, columns, values, self._trt.ScatterMode.ELEMENT)
        layer.axis = 1
        return self._out(layer)

    def sum_over_ranks(self, x, ranks: int):
        """The sum of every rank's x."""
        return self._collective(x, "ALL_REDUCE", "SUM", ranks)

    def join_columns(self, x, ranks: int):
        """Every rank's x [rows, columns] side by side, in the order of ranks."""
        columns = x.shape[1]
        layer = self._network.add_shuffle(self._collective(x, "ALL_GATHER", "NONE", ranks))
        layer.reshape_dims = (ranks, -1, columns)
        layer.second_transpose = (1, 0, 2)
        return self.reshape(self._out(layer), (-1, ranks * columns))

    def rotate(self, x, cos, sin):
        """RoPE of x [batch, heads, rows, size]: pairs (i, i + size / 2), cos and sin [batch, rows, size / 2]."""
        return self._out(self._network.add_rotary_embedding(x, cos, sin, False, 0))

    def update_cache(self, cache, update, start):
        """cache [batch, heads, capacity, size] with update [batch, heads, rows, size] written at start, int32 [batch]."""
        return self._out(self._network.add_kv_cache_update(cache, update, start, self._trt.KVCacheMode.LINEAR))

    def attention(self, queries, keys, values, visible):
        """softmax(queries @ keys.T) @ values of queries [batch, heads, rows, size], keys and values [batch, kv heads, span, size], over
        those keys alone that a row sees as `visible`, bool [batch, 1, rows, span], says."""
        kinds = self._trt.AttentionNormalizationOp.SOFTMAX, self._trt.CausalMaskKind.NONE
        layer = self._network.add_attention_v2(queries, keys, values, *kinds)
        layer.mask = visible
        layer.decomposable = True  # not every head size has a fused kernel
        return self._out(layer)

    @property
    def takes_plugins(self) -> bool:
        return self._add_plugin is not None

    def plugin(self, operation: str, *inputs, **attributes) -> Sequence[object]:
        """The outputs of an operation as `quasar_trt.plugins.tensorrt` registers it."""
        return self._add_plugin(self._network, operation, inputs, attributes)

    def _part(self, x, axis: int, start: int, count: int):
        layer = self._network.add_slice(x, (start,), (count,), (1,))
        layer.axes = (axis,)
        return self._out(layer)

    def _joined(self, tensors, axis: int):
        layer = self._network.add_concatenation(tensors)
        layer.axis = axis
        return self._out(layer)

    def _collective(self, x, operation: str, reduction: str, ranks: int):
        trt = self._trt
        kinds = getattr(trt.CollectiveOperation, operation), getattr(trt.ReduceOperation, reduction)
        layer = self._network.add_dist_collective(x, *kinds, -1, [])
        layer.num_ranks = ranks
        layer.metadata = operation  # which the layer itself does not show
        return self._out(layer)

    def _dtype(self, name: str):
        return getattr(self._trt.DataType, _DTYPES[name])

    def _elementwise(self, x, y, operation: str):
        return self._out(self._network.add_elementwise(x, y, getattr(self._trt.ElementWiseOperation, operation)))

    def _out(self, layer):
        """The output, under a short name: the names that TensorRT gives are part of a plan, many times over."""
        tensor = layer.get_output(0)
        layer.name = tensor.name = str(self._network.num_layers)
        return tensor
