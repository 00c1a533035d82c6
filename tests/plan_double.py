"""TensorRT's runtime and a GPU, as far as an engine touches them: a plan is a network graph, run by the interpreter on the
memory whose addresses it was given."""

from __future__ import annotations

import ctypes
import math
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from network_graph import Graph
from network_interpreter import DTYPES, Interpreter

from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.plan_bindings import PlanSizes


class CpuDevice:
    """The calls of `CudaDevice`, in host memory."""

    torch_device = torch.device("cpu")

    def __init__(self, sm: int = 80, free: int = 10**9):
        self.name = "a double"
        self.sm = sm
        self.free = free

    def free_memory(self) -> int:
        return self.free

    def stream(self):
        return nullcontext(7)


class _Logger:
    """Severities as numbers."""

    INTERNAL_ERROR, ERROR, WARNING = range(3)


class TensorRTDouble:
    """The module. graph: what the plan computes, None for a plan that cannot be loaded; sizes: the bounds of its profile.

    refuses: a method of the execution context that says no."""

    __version__ = "1.7.1.116"
    ILogger = _Logger

    def __init__(self, graph: Graph | None, sizes: PlanSizes, device_memory: int = 0, refuses: str = ""):
        self.graph = graph
        self.sizes = sizes
        self.device_memory = device_memory
        self.refuses = refuses
        self.loaded: list[bytes] = []
        self.kernels: list[bytes] = []  # what every session found kept
        self.CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole")
        self.passes: list[dict[str, tuple[int, ...]]] = []  # shapes of the inputs of every pass

    def Runtime(self, logger):
        self.logger = logger
        return SimpleNamespace(deserialize_cuda_engine=self._load)

    def _load(self, content: bytes):
        self.loaded.append(bytes(content))
        if self.graph is None:
            self.logger.log(_Logger.WARNING, "a warning")
            self.logger.log(_Logger.ERROR, "the magic tag\ndoes not match")
            self.logger.log(_Logger.ERROR, "loading failed")
            return None
        types = {tensor.name: tensor.dtype for tensor in (*self.graph.inputs, *self.graph.outputs)}
        return SimpleNamespace(
            device_memory_size_v2=self.device_memory,
            get_tensor_dtype=lambda name: SimpleNamespace(name=types[name]),
            create_runtime_config=lambda: _RuntimeConfig(self),
            create_execution_context=self._context,
        )

    def _context(self, runtime_config):
        assert runtime_config.cuda_graph_strategy == "whole"
        assert runtime_config.kernels is not None
        return _Context(self, self.logger)


class _RuntimeConfig:
    """A runtime configuration, its own cache of kernels."""

    kernels: bytes | None = None

    def __init__(self, trt: TensorRTDouble):
        self._trt = trt

    def create_runtime_cache(self):
        return self

    def deserialize(self, content: bytes) -> bool:
        self._trt.kernels.append(content)
        return True

    def serialize(self) -> bytes:
        return b"kernels"

    def set_runtime_cache(self, cache):
        assert cache is self
        self.kernels = b""


class _Context:
    """An execution context."""

    def __init__(self, trt: TensorRTDouble, logger):
        self._trt = trt
        self._logger = logger
        self._run = Interpreter(trt.graph)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_input_shape(self, name, shape) -> bool:
        self._shapes[name] = shape
        return self._says("set_input_shape")

    def set_tensor_address(self, name, address) -> bool:
        self._addresses[name] = address
        return self._says("set_tensor_address")

    def execute_async_v3(self, stream) -> bool:
        assert stream == 7
        graph, sizes = self._trt.graph, self._trt.sizes
        batch, rows = self._shapes[bindings.INPUT_IDS]
        (wanted,) = self._shapes[bindings.LOGITS_ROWS]
        assert 1 <= batch <= sizes.largest.batch and 1 <= rows <= sizes.largest.rows and wanted <= sizes.largest.wanted
        inputs = {
            tensor.name: self._tensor(tensor.name, tensor.dtype, self._shapes[tensor.name]) for tensor in graph.inputs
        }
        longest = int(inputs[bindings.KEY_VALUE_LENGTHS].max())
        assert longest <= int(inputs[bindings.SPAN]) <= sizes.capacity
        assert int(inputs[bindings.LOGITS_ROWS].min()) >= 0 and int(inputs[bindings.LOGITS_ROWS].max()) < batch * rows
        for tensor in graph.outputs:
            if tensor.name != bindings.LOGITS:  # updated in place
                assert self._addresses[tensor.name] == self._addresses[f"past_{tensor.name}"]
        self._trt.passes.append(dict(self._shapes))
        outputs = self._run(inputs)
        result = outputs[bindings.LOGITS]
        self._tensor(bindings.LOGITS, graph.outputs[-1].dtype, tuple(result.shape)).copy_(result)
        return self._says("execute_async_v3")

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The memory that a binding points to."""
        size = math.prod(shape) * DTYPES[dtype].itemsize
        memory = (ctypes.c_char * size).from_address(self._addresses[name])
        return torch.frombuffer(memory, dtype=DTYPES[dtype]).reshape(shape)

    def _says(self, method: str) -> bool:
        if method == self._trt.refuses:
            self._logger.log(_Logger.ERROR, f"{method} was refused")
        return method != self._trt.refuses
