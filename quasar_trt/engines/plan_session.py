"""A TensorRT plan on its device: its contexts, the CUDA graphs captured from them, and the passes that they run."""

from __future__ import annotations

import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.engines.plan_context import PlanContext
from quasar_trt.engines.plan_memory import PassShape, PlanMemory, Trees
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig
from quasar_trt.tensorrt_stack import quiet_logger
from quasar_trt.user_cache import cache_path, read_cache, write_cache

_DTYPES = {"BF16": torch.bfloat16, "FLOAT": torch.float32}
_MOST_GRAPHS = 32


class PlanSession:
    """Loads a plan and runs passes over the slots of its KV cache.

    A verify pass of TensorRT is captured into a CUDA graph the first time that its shape comes; the graphs used last are kept. A
    context may not change while a graph of it is in use, so each has its own, and all share the memory they compute in.
    TensorRT-RTX captures by itself.

    trt: the module that compiled the plan; name: of the plan, as no other plan has it. memory: what passes read and write.
    device_bytes: all that plan and session take. progress: odd within what several ranks do together.

    Raises QuasarError when memory does not suffice, naming both numbers, and when the plan cannot be loaded, with the reason
    that TensorRT gives.
    """

    def __init__(
        self, trt: ModuleType, path: Path, device: CudaDevice, config: ModelConfig, sizes: PlanSizes, name: str
    ):
        self.progress = 0
        self._trt = trt
        self._path = path
        self.device = device
        self._sizes = sizes
        self._communicator: object = None
        weights, caches = path.stat().st_size, sizes.cache_bytes(config)
        _check_memory(weights + caches, device, path, sizes)
        self._logger = quiet_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise QuasarError(f"{path} cannot be loaded: {self._logger.first_error}; build the engine again")
        others = caches + sizes.output_bytes(config) + self._engine.device_memory_size_v2
        _check_memory(others, device, path, sizes)
        self.memory = PlanMemory(device, config, sizes, lambda name: _DTYPES[self._engine.get_tensor_dtype(name).name])
        self.device_bytes = weights + others
        # None where TensorRT captures graphs by itself.
        self._graphs: OrderedDict[PassShape, tuple[PlanContext, Callable[[], None]]] | None = None
        if hasattr(trt, "CudaGraphStrategy"):
            self._runtime_config = self._capturing_config(name)
        else:
            self._graphs = OrderedDict()
            self._scratch = device.empty((self._engine.device_memory_size_v2,), torch.uint8)

    def start(self, communicator: Callable[[], object] = lambda: None) -> None:
        """To be called once, before any pass. communicator: makes that of NCCL, a capsule, for a plan of one of several ranks, which
        all start together. Raises QuasarError with TensorRT's reason when it refuses."""
        try:
            with self._together():
                self._communicator = communicator()
                self._context = self._new_context()
        except RuntimeError as error:
            raise QuasarError(f"{self._path} cannot be run: {error}") from None

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What ranks do together; on the device, whichever thread asks."""
        self.progress += 1
        try:
            with self.device.use():
                yield
        finally:
            self.progress += 1

    def run(
        self,
        first_slot: int,
        ids: np.ndarray,
        past_lengths: np.ndarray,
        wanted: Sequence[int],
        trees: Trees | None = None,
    ) -> np.ndarray:
        """One pass over neighbouring slots from `first_slot`.

        ids: int32 [batch, rows], padded at the end; past_lengths: int32 [batch], tokens that each slot holds; wanted:
        which of the batch * rows rows have logits; trees: by places in the batch, all others are chains. Returns the logits, float32
        [wanted, vocab], valid until the next pass. Raises RuntimeError when TensorRT refuses or fails.
        """
        self._logger.forget()
        shape = self.memory.send(first_slot, ids, past_lengths, wanted, trees or {})
        with self._together():
            if self._graphs is None or shape.rows > self._sizes.verify.rows:
                self._context.bind(shape)
                self._context.execute()
            else:
                self._verify(shape)
            return self.memory.receive(len(wanted), ids.size)

    def _verify(self, shape: PassShape) -> None:
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
            _, replay = self._graphs[shape]
            replay()
            return
        if len(self._graphs) < _MOST_GRAPHS:
            context = self._new_context()
        else:
            _, (context, _) = self._graphs.popitem(last=False)
        context.bind(shape)
        context.execute()  # the pass itself; what TensorRT does once for a shape must not be captured
        self._graphs[shape] = context, self.device.capture(context.execute)

    def _new_context(self) -> PlanContext:
        """Raises RuntimeError when TensorRT makes none. Of several ranks each makes as many, in the same order."""
        if self._graphs is None:
            context = self._engine.create_execution_context(self._runtime_config)
        else:
            context = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None or not (self._communicator is None or context.set_communicator(self._communicator)):
            raise RuntimeError(self._logger.first_error)
        if self._graphs is not None:
            context.set_device_memory(self._scratch.data_ptr(), self._scratch.nbytes)
        profiles = self._sizes if self._engine.num_optimization_profiles > 1 else None
        return PlanContext(context, self._logger, self.memory, self.device, profiles)

    def _capturing_config(self, name: str):
        """TensorRT-RTX captures a graph of each shape of pass and window of slots, as all other addresses stay.

        It compiles kernels as it meets them; they are kept for the next start when this session or the process ends.
        """
        runtime_config = self._engine.create_runtime_config()
        runtime_config.cuda_graph_strategy = self._trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        kernels, path = runtime_config.create_runtime_cache(), cache_path("kernels", f"{name}.cache")
        if kept := read_cache(path):
            kernels.deserialize(kept)  # refused by another machine, and then made anew
        runtime_config.set_runtime_cache(kernels)
        weakref.finalize(self, lambda: write_cache(path, bytes(kernels.serialize())))
        return runtime_config


def _check_memory(needed: int, device: CudaDevice, path: Path, sizes: PlanSizes) -> None:
    free = device.free_memory()
    if needed > free:
        limits = sizes.limits
        raise QuasarError(
            f"{path} needs {needed / 1e9:.2f} GB on {device.name}, {free / 1e9:.2f} GB are free; build it with less than "
            f"max_batch_size {limits.max_batch_size} or max_seq_len {limits.max_seq_len}"
        )
