"""A double of `tensorrt` under TensorRT's own plugin layer.

The Python package `tensorrt.plugin`, from the wheel `tensorrt-cu13-bindings`, is the real one: it reads annotations, checks
signatures, evaluates shapes and calls what is registered. What it calls in turn lives in TensorRT's library, which needs a GPU:
of that, this module has as much as a plugin layer takes. No kernel is executed.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

DataType = enum.Enum("DataType", "FLOAT HALF INT8 INT32 BF16 INT64")
TensorFormat = enum.Enum("TensorFormat", "LINEAR HWC")
DimensionOperation = enum.Enum("DimensionOperation", "SUM PROD MAX MIN SUB EQUAL LESS FLOOR_DIV CEIL_DIV")
Request = enum.Enum("QuickPluginCreationRequest", "PREFER_AOT PREFER_JIT STRICT_AOT STRICT_JIT")

_OPERATIONS: dict[DimensionOperation, Callable[[int, int], int]] = {
    DimensionOperation.SUM: lambda a, b: a + b,
    DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


@dataclass
class Expression:
    """An IDimensionExpr: its value as a function of the sizes of dynamic dimensions, or a constant."""

    value: Callable[[Mapping[str, int]], int] | int

    def is_constant(self) -> bool:
        return isinstance(self.value, int)

    def get_constant_value(self) -> int:
        assert self.is_constant()
        return self.value

    def at(self, sizes: Mapping[str, int]) -> int:
        return self.value if self.is_constant() else self.value(sizes)


class ExpressionBuilder:
    def constant(self, value: int) -> Expression:
        return Expression(value)

    def operation(self, operation: DimensionOperation, a: Expression, b: Expression) -> Expression:
        apply = _OPERATIONS[operation]
        if a.is_constant() and b.is_constant():
            return Expression(apply(a.value, b.value))
        return Expression(lambda sizes: apply(a.at(sizes), b.at(sizes)))


class Dims(list):
    MAX_DIMS = 8


class DimsExprs(list):
    def __init__(self, length: int):
        super().__init__([None] * length)


class PluginField:
    def __init__(self, name: str, data, kind):
        self.name = name
        self.data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data


class Registry:
    def __init__(self):
        self.creators = {}

    def register_creator(self, creator, namespace: str) -> None:
        self.creators[namespace, creator.name] = creator

    def get_creator(self, name: str, version: str, namespace: str):
        return self.creators[namespace, name]


@dataclass
class PluginTensorDesc:
    dims: Sequence[int] = ()
    type: DataType | None = None
    format: TensorFormat | None = TensorFormat.LINEAR
    scale: float = 1.0


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc


def _module() -> types.ModuleType:
    double = types.ModuleType("tensorrt")
    bindings = importlib.util.find_spec("tensorrt_bindings")
    double.__path__ = list(bindings.submodule_search_locations)
    registry, kinds = Registry(), "INT8 INT16 INT32 INT64 FLOAT16 FLOAT32 FLOAT64 CHAR UNKNOWN"
    double.__dict__.update(
        DataType=DataType,
        TensorFormat=TensorFormat,
        DimensionOperation=DimensionOperation,
        QuickPluginCreationRequest=Request,
        IDimensionExpr=Expression,
        IExprBuilder=ExpressionBuilder,
        Dims=Dims,
        DimsExprs=DimsExprs,
        PluginField=PluginField,
        PluginFieldCollection=list,
        PluginFieldType=enum.Enum("PluginFieldType", kinds),
        PluginTensorDesc=PluginTensorDesc,
        DynamicPluginTensorDesc=DynamicPluginTensorDesc,
        PluginArgType=enum.Enum("PluginArgType", "INT"),
        PluginArgDataType=enum.Enum("PluginArgDataType", "INT8 INT16 INT32"),
        TensorRTPhase=enum.Enum("TensorRTPhase", "BUILD RUNTIME"),
        Logger=type("Logger", (), {"WARNING": 1, "log": lambda self, severity, text: None}),
        get_plugin_registry=lambda: registry,
    )
    bases = (
        "ITensor ISymExpr IPluginV3 IPluginV3QuickCore IPluginV3QuickBuild IPluginV3QuickRuntime IPluginV3QuickAOTBuild"
    )
    for name in (*bases.split(), "IPluginCreatorV3Quick"):
        setattr(double, name, type(name, (), {}))
    return double


@contextmanager
def tensorrt_double() -> Iterator[types.ModuleType]:
    """While it lasts, `import tensorrt` gives the double; yields `tensorrt.plugin`."""
    ours = "quasar_trt.plugins.tensorrt"
    assert "tensorrt" not in sys.modules and ours not in sys.modules
    sys.modules["tensorrt"] = _module()
    try:
        yield importlib.import_module("tensorrt.plugin")
    finally:
        for name in [*sys.modules]:
            if name in ("tensorrt", ours) or name.startswith("tensorrt."):
                del sys.modules[name]


@dataclass
class Layer:
    """A plugin layer as TensorRT would build it, for given sizes of its dynamic dimensions.

    outputs: (shape, type) of each. combinations: types of inputs and outputs that it accepts, all in linear format.
    grid, block: of the launch; scalars: of the kernel, between the inputs and the outputs.
    """

    outputs: list[tuple[tuple[int, ...], DataType]]
    combinations: list[tuple[DataType, ...]]
    tactics: list[int]
    kernel: str = ""
    ptx: str = ""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared: int = 0
    scalars: list[int] = field(default_factory=list)


def plugin_layer(
    plugin: types.ModuleType,
    name: str,
    inputs: Sequence[tuple[tuple[int | str, ...], DataType]],
    attributes: Mapping[str, object],
    sizes: Mapping[str, int],
    tactic: int = 0,
) -> Layer:
    """Adds `quasar::name` and takes it through the calls of a build. A dimension of an input is a size or a key of `sizes`."""
    tensors = [sys.modules["tensorrt"].ITensor() for _ in inputs]
    _, _, instance = getattr(plugin.op.quasar, name)(*tensors, **attributes)(Request.STRICT_AOT)
    builder = ExpressionBuilder()

    def expression(dimension: int | str) -> Expression:
        return Expression(dimension if isinstance(dimension, int) else lambda sizes: sizes[dimension])

    types_ = instance.get_output_data_types([kind for _, kind in inputs], [len(shape) for shape, _ in inputs])
    expressions = instance.get_output_shapes([[*map(expression, shape)] for shape, _ in inputs], [], builder)
    outputs = [(tuple(e.at(sizes) for e in dims), kind) for dims, kind in zip(expressions, types_, strict=True)]
    shapes = [shape for shape, _ in inputs] + [
        tuple(e.value if e.is_constant() else -1 for e in dims) for dims in expressions
    ]
    kinds = [kind for _, kind in inputs] + types_
    in_out = [
        DynamicPluginTensorDesc(PluginTensorDesc([d if isinstance(d, int) else -1 for d in shape], kind))
        for shape, kind in zip(shapes, kinds, strict=True)
    ]

    accepted = instance.get_supported_format_combinations(in_out, len(inputs))
    assert all(tensor.format is TensorFormat.LINEAR for tensor in accepted)
    combinations = [tuple(t.type for t in accepted[i : i + len(kinds)]) for i in range(0, len(accepted), len(kinds))]
    assert tuple(kinds) in combinations, f"{kinds} is none of {combinations}"
    instance.configure_plugin(in_out[: len(inputs)], in_out[len(inputs) :])
    layer = Layer(outputs, combinations, sorted(instance.get_valid_tactics()))

    instance.set_tactic(tactic)
    launch, scalars = types.SimpleNamespace(), Scalars()
    instance.get_launch_params(None, in_out, len(inputs), launch, scalars, builder)
    descs = [desc.desc for desc in in_out]
    name_, ptx = instance.get_kernel(descs[: len(inputs)], descs[len(inputs) :])
    layer.kernel, layer.ptx = name_, ptx.decode()
    layer.grid = tuple(getattr(launch, f"grid_{axis}").expr.at(sizes) for axis in "xyz")
    layer.block = tuple(getattr(launch, f"block_{axis}").expr.at(sizes) for axis in "xyz")
    layer.shared = launch.shared_mem.expr.at(sizes)
    layer.scalars = [scalars[i].expr.at(sizes) for i in range(scalars.nbSymExprs)]
    return layer


class Scalars(dict):
    """What a plugin sets its int32 scalars on."""

    nbSymExprs = 0
