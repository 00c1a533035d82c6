"""An execution context of a plan."""

from __future__ import annotations

import torch

from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.engines.plan_memory import PassShape, PlanMemory


class PlanContext:
    """Runs passes of the shape that it was bound to last. Methods raise RuntimeError, with TensorRT's reason, when it refuses.

    context: of TensorRT; logger: of its runtime. sizes: of a plan with several optimization profiles.
    """

    def __init__(self, context, logger, memory: PlanMemory, device: CudaDevice, sizes: PlanSizes | None):
        self._context = context
        self._sizes = sizes
        self._logger = logger
        self._memory = memory
        self._device = device
        self._bound: PassShape | None = None
        self._span = device.pinned((1,), torch.int64)  # the host reads it when a pass is given to the stream

    def bind(self, shape: PassShape) -> None:
        if shape == self._bound:
            return
        self._bound = None
        if self._sizes is not None:
            profile = shape.profile(self._sizes)
            self._done(self._context.set_optimization_profile_async(profile, self._device.stream))
        self._span[0] = shape.span
        self._bind(bindings.SPAN, (1,), self._span.data_ptr())
        for name, sizes, address in self._memory.inputs(shape):
            self._bind(name, sizes, address)
        for name, address in self._memory.outputs(shape):
            self._done(self._context.set_tensor_address(name, address))
        self._bound = shape

    def execute(self) -> None:
        """Gives a pass to the stream."""
        self._done(self._context.execute_async_v3(self._device.stream))

    def _bind(self, name: str, sizes: tuple[int, ...], address: int) -> None:
        self._done(self._context.set_input_shape(name, sizes))
        self._done(self._context.set_tensor_address(name, address))

    def _done(self, success: bool) -> None:
        if not success:
            raise RuntimeError(f"TensorRT cannot run this pass: {self._logger.first_error}")
