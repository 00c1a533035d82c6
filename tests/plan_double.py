"""TensorRT's runtime and a GPU, as far as an engine touches them: a plan is a network graph, run by the interpreter on the
memory whose addresses it was given. Nothing is done before it is waited for, and what CUDA leaves undefined fails."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from network_graph import Graph
from network_interpreter import DTYPES, Interpreter

from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.plan_bindings import PlanSizes

_STREAM = 7
_ALIGNMENT = 256


class CpuDevice:
    """The calls of `CudaDevice`, in host memory.

    replayed: how often a captured graph ran.
    """

    stream = _STREAM
    torch_device = torch.device("cpu")

    def __init__(self, sm: int = 80, free: int = 10**9, identity: str = "GPU-0"):
        self.name = "a double"
        self.identity = identity
        self.sm = sm
        self.cache = 0
        self.free = free
        self.replayed = 0
        self._pinned: dict[int, torch.Tensor] = {}  # by address, which none of them gives back
        self._queue: list[Callable[[], None]] = []
        self._capturing: list[Callable[[], None]] | None = None

    def free_memory(self) -> int:
        return self.free

    def empty(self, shape, dtype):
        """As memory comes: with what nobody may read, at a multiple of 256 bytes."""
        size = math.prod(shape) * dtype.itemsize
        memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % _ALIGNMENT
        tensor = memory[start : start + size].view(dtype).view(shape)
        return tensor.fill_(torch.nan if dtype.is_floating_point else 77)

    def pinned(self, shape, dtype):
        tensor = self.empty(shape, dtype)
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def copy(self, target, source):
        assert target.shape == source.shape
        pinned = [tensor.untyped_storage().data_ptr() in self._pinned for tensor in (target, source)]
        assert not all(pinned) and (not any(pinned) or target.dtype == source.dtype)
        if pinned[0]:
            target.fill_(torch.nan)  # until the copy is done
        self._give(lambda: target.copy_(source))

    def zero(self, tensor):
        self.run(tensor.zero_)

    def use(self):
        return nullcontext()

    def run(self, work):
        self._give(work)

    def wait(self):
        assert self._capturing is None, "waiting breaks a capture"
        while self._queue:
            self._queue.pop(0)()

    def capture(self, run):
        self._capturing = captured = []
        try:
            run()
        finally:
            self._capturing = None

        def replay():
            self.replayed += 1
            self._queue += captured

        return replay

    def _give(self, work):
        assert self._capturing is None, "copies do not belong into a graph of passes"
        self._queue.append(work)

    def launch(self, work: Callable[[], None], check: Callable[[], None]) -> bool:
        """The work of a pass: into the graph that is being captured, with what must hold whenever it is replayed, or the queue.
        Says which: whether into a graph."""
        if self._capturing is None:
            self._queue.append(work)
            return False
        self._capturing += [check, work]
        return True


class _Logger:
    """Severities as numbers."""

    INTERNAL_ERROR, ERROR, WARNING = range(3)


class TensorRTDouble:
    """The module `tensorrt_rtx`, or `tensorrt`, whose contexts share memory and can be captured.

    graph: what the plan computes, None for a plan that cannot be loaded; sizes: the bounds of its profile. refuses: a method of
    the execution context that says no. communicators: those that contexts were given. collective: what several ranks make of an
    operation and this rank's tensor."""

    __version__ = "1.7.1.116"
    ILogger = _Logger

    def __init__(
        self,
        graph: Graph | None,
        sizes: PlanSizes,
        device: CpuDevice,
        rtx: bool = True,
        device_memory: int = 0,
        refuses: str = "",
    ):
        self.graph = graph
        self.sizes = sizes
        self.device = device
        self.device_memory = device_memory
        self.refuses = refuses
        self.loaded: list[bytes] = []
        self.kernels: list[bytes] = []  # what every session found kept
        self.bounds = (sizes.largest,) if rtx else sizes.profiles
        self.contexts: list[_Context] = []
        self.communicators: list[object] = []
        self.collective: Callable[[str, torch.Tensor], torch.Tensor] | None = None
        if rtx:
            self.CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole")
        else:
            self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="shared")
        self.passes: list[dict[str, tuple[int, ...]]] = []  # shapes of the inputs of every pass
        self.spans: list[int] = []  # of every pass

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
            num_optimization_profiles=len(self.bounds),
            device_memory_size_v2=self.device_memory,
            get_tensor_dtype=lambda name: SimpleNamespace(name=types[name]),
            create_runtime_config=lambda: _RuntimeConfig(self),
            create_execution_context=self._context,
        )

    def _context(self, how):
        if how != "shared":
            assert how.cuda_graph_strategy == "whole" and how.kernels is not None
        self.contexts.append(_Context(self, self.logger, shares=how == "shared"))
        return self.contexts[-1]


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

    def __init__(self, trt: TensorRTDouble, logger, shares: bool):
        self._trt = trt
        self._logger = logger
        self._shares = shares
        self._profile = 0
        self._memory: tuple[int, int] | None = None
        self._run = Interpreter(trt.graph)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._changes = 0
        self._prepared = -1  # changes before the last pass

    def set_input_shape(self, name, shape) -> bool:
        self._shapes[name] = shape
        self._changes += 1
        return self._says("set_input_shape")

    def set_tensor_address(self, name, address) -> bool:
        assert address % _ALIGNMENT == 0
        self._addresses[name] = address
        self._changes += 1
        return self._says("set_tensor_address")

    def set_optimization_profile_async(self, profile, stream) -> bool:
        assert stream == _STREAM
        self._profile = profile
        self._shapes.clear()
        self._changes += 1
        return self._says("set_optimization_profile_async")

    def set_device_memory(self, address, size) -> None:
        assert size >= self._trt.device_memory and (address or not size)
        self._memory = address, size

    def set_communicator(self, communicator) -> bool:
        self._trt.communicators.append(communicator)
        return self._says("set_communicator")

    def execute_async_v3(self, stream) -> bool:
        assert stream == _STREAM
        assert not self._shares or self._memory is not None, "the context has no memory to compute in"
        graph, sizes, shapes, addresses = self._trt.graph, self._trt.sizes, dict(self._shapes), dict(self._addresses)
        batch, rows = shapes[bindings.INPUT_IDS]
        (wanted,) = shapes[bindings.LOGITS_ROWS]
        most = self._trt.bounds[self._profile]
        assert 1 <= batch <= most.batch and 1 <= rows <= most.rows and 1 <= wanted <= most.wanted
        updated = [tensor for tensor in graph.outputs if f"past_{tensor.name}" in addresses]
        for tensor in updated:  # in place
            assert addresses[tensor.name] == addresses[f"past_{tensor.name}"]
        span = int(_tensor(addresses[bindings.SPAN], "INT64", (1,)))  # read by the host, now
        changes = self._changes

        def run() -> None:
            inputs = {
                tensor.name: _tensor(addresses[tensor.name], tensor.dtype, shapes[tensor.name])
                for tensor in graph.inputs
            }
            inputs[bindings.SPAN] = torch.tensor([span])
            longest = int(inputs[bindings.PAST_LENGTHS].max()) + rows
            assert longest <= span <= sizes.capacity
            assert int(inputs[bindings.LOGITS_ROWS].min()) >= 0
            assert int(inputs[bindings.LOGITS_ROWS].max()) < batch * rows
            self._trt.passes.append(shapes)
            self._trt.spans.append(span)
            found = self._compute(inputs)
            for tensor in graph.outputs:
                if tensor not in updated:
                    result = found[tensor.name]
                    _tensor(addresses[tensor.name], tensor.dtype, tuple(result.shape)).copy_(result)

        def unchanged() -> None:
            assert self._changes == changes, "the context has changed since its graph was captured"

        if self._trt.device.launch(run, unchanged):
            assert self._prepared == changes, "a shape is captured before TensorRT has prepared itself for it"
        self._prepared = changes
        return self._says("execute_async_v3")

    def _compute(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        steps, result = self._run.steps(inputs), None
        while True:
            try:
                operation, part = steps.send(result)
            except StopIteration as finished:
                return finished.value
            result = self._trt.collective(operation, part)

    def _says(self, method: str) -> bool:
        if method == self._trt.refuses:
            self._logger.log(_Logger.ERROR, f"{method} was refused")
        return method != self._trt.refuses


def _tensor(address: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The memory that a binding points to."""
    memory = (ctypes.c_char * (math.prod(shape) * DTYPES[dtype].itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=DTYPES[dtype]).reshape(shape)
