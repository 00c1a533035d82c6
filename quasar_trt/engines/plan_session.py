"""A TensorRT plan on its device: the caches, the bindings of a pass, and its execution."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig
from quasar_trt.tensorrt_stack import quiet_logger
from quasar_trt.user_cache import cache_path, read_cache, write_cache

_DTYPES = {"BF16": torch.bfloat16, "FLOAT": torch.float32}
_SPAN_STEP = (
    256  # attention reads a multiple of so many tokens, because TensorRT prepares itself for each shape of pass anew
)


class PlanSession:
    """Loads a plan and runs passes over the slots of its KV cache.

    trt: the module that compiled the plan; name: of the plan, as no other plan has it. Raises QuasarError when memory does not
    suffice, naming both numbers, and when the plan cannot be loaded, with the reason that TensorRT gives.
    """

    def __init__(
        self, trt: ModuleType, path: Path, device: CudaDevice, config: ModelConfig, sizes: PlanSizes, name: str
    ):
        self._device = device
        self._sizes = sizes
        slot = (config.num_key_value_heads, sizes.capacity, config.head_size)
        shape = (sizes.limits.max_batch_size, *slot)
        caches = 2 * config.num_hidden_layers * torch.bfloat16.itemsize * int(np.prod(shape))
        _check_memory(path.stat().st_size + caches, device, path, sizes)
        logger = quiet_logger(trt)
        self._runtime = trt.Runtime(logger)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise QuasarError(f"{path} cannot be loaded: {logger.first_error}; build the engine again")
        most = sizes.largest
        logits = most.wanted * config.logits_size * (torch.bfloat16.itemsize + torch.float32.itemsize)
        _check_memory(caches + logits + self._engine.device_memory_size_v2, device, path, sizes)
        self._context = self._new_context(trt, name)
        if self._context is None:
            raise QuasarError(f"{path} cannot be run: {logger.first_error}")
        self._logger = logger

        def on_device(binding: str, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            dtype = dtype or _DTYPES[self._engine.get_tensor_dtype(binding).name]
            return torch.empty(sizes, dtype=dtype, device=device.torch_device)

        rows = most.batch * most.rows
        lengths = {
            bindings.INPUT_IDS: rows,
            bindings.POSITIONS: rows,
            bindings.PAST_LENGTHS: most.batch,
            bindings.KEY_VALUE_LENGTHS: most.batch,
            bindings.LOGITS_ROWS: most.wanted,
        }
        self._inputs = {name: on_device(name, length, dtype=torch.int32) for name, length in lengths.items()}
        self._logits = on_device(bindings.LOGITS, most.wanted, config.logits_size)
        self._caches = {
            names: on_device(names[0], *shape)
            for i in range(config.num_hidden_layers)
            for names in bindings.cache_bindings(i)
        }

    def _new_context(self, trt: ModuleType, name: str):
        """TensorRT-RTX captures CUDA graphs by itself: of each shape of pass and window of slots, as all other addresses stay.

        It compiles kernels as it meets them; they are kept for the next start when this session or the process ends.
        """
        if not hasattr(trt, "CudaGraphStrategy"):
            return self._engine.create_execution_context()
        runtime_config = self._engine.create_runtime_config()
        runtime_config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        kernels, path = runtime_config.create_runtime_cache(), cache_path("kernels", f"{name}.cache")
        if kept := read_cache(path):
            kernels.deserialize(kept)  # refused by another machine, and then made anew
        runtime_config.set_runtime_cache(kernels)
        weakref.finalize(self, lambda: write_cache(path, bytes(kernels.serialize())))
        return self._engine.create_execution_context(runtime_config)

    def run(self, first_slot: int, ids: np.ndarray, past_lengths: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
        """One pass over neighbouring slots from `first_slot`.

        ids: int32 [batch, rows], padded at the end; past_lengths: int32 [batch], tokens that each slot holds; wanted:
        which of the batch * rows rows have logits. Returns these, float32 [wanted, vocab]. Raises RuntimeError when
        TensorRT refuses or fails.
        """
        batch, rows = ids.shape
        # A verify pass has logits of all rows, so that its shape does not depend on how long the drafts are.
        logits_rows = np.zeros(ids.size if rows <= self._sizes.verify.rows else max(1, len(wanted)), np.int32)
        logits_rows[: len(wanted)] = wanted
        span = -(-(int(past_lengths.max()) + rows) // _SPAN_STEP) * _SPAN_STEP
        span = torch.tensor([min(span, self._sizes.capacity)])  # int64, in host memory
        inputs = {
            bindings.INPUT_IDS: ids,
            bindings.POSITIONS: past_lengths[:, None] + np.arange(rows, dtype=np.int32),
            bindings.PAST_LENGTHS: past_lengths,
            bindings.KEY_VALUE_LENGTHS: past_lengths + np.int32(rows),
            bindings.LOGITS_ROWS: logits_rows,
        }
        self._logger.forget()
        with self._device.stream() as stream:
            self._bind(bindings.SPAN, span)
            for name, array in inputs.items():
                tensor = self._inputs[name][: array.size].view(array.shape)
                tensor.copy_(torch.from_numpy(array))
                self._bind(name, tensor)
            for (past, present), cache in self._caches.items():
                slots = cache[first_slot : first_slot + batch]
                self._bind(past, slots)
                self._done(self._context.set_tensor_address(present, slots.data_ptr()))
            self._done(self._context.set_tensor_address(bindings.LOGITS, self._logits.data_ptr()))
            self._done(self._context.execute_async_v3(stream))
            return self._logits[: len(wanted)].to("cpu", torch.float32, copy=True).numpy()  # waits for the pass

    def clear(self, slot: int) -> None:
        """Zeros in a slot's cache: what attention masks has weight 0, and 0 times NaN would be NaN."""
        with self._device.stream():
            for cache in self._caches.values():
                cache[slot].zero_()

    def _bind(self, name: str, tensor: torch.Tensor) -> None:
        self._done(self._context.set_input_shape(name, tuple(tensor.shape)))
        self._done(self._context.set_tensor_address(name, tensor.data_ptr()))

    def _done(self, success: bool) -> None:
        if not success:
            raise RuntimeError(f"TensorRT cannot run this pass: {self._logger.first_error}")


def _check_memory(needed: int, device: CudaDevice, path: Path, sizes: PlanSizes) -> None:
    free = device.free_memory()
    if needed > free:
        limits = sizes.limits
        raise QuasarError(
            f"{path} needs {needed / 1e9:.2f} GB on {device.name}, {free / 1e9:.2f} GB are free; build it with less than "
            f"max_batch_size {limits.max_batch_size} or max_seq_len {limits.max_seq_len}"
        )
