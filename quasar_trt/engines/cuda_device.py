"""The few calls to CUDA that the engine of plans makes, through torch. All work goes to one stream, in the order of the calls."""

from __future__ import annotations

import ctypes.util
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from quasar_trt.errors import QuasarError


class CudaDevice:
    """An NVIDIA GPU, the current one by default. Raises QuasarError when there is none that torch can use.

    index: of one among those that are seen, taken in turn. identity: as no other GPU has it. stream: the handle of the stream.
    sm: compute capability times ten. cache: bytes of its L2 cache.
    """

    def __init__(self, index: int | None = None):
        if torch.version.cuda is None:
            raise QuasarError(f"torch {torch.__version__} is built without CUDA; a GPU needs a CUDA build of it")
        if not torch.cuda.is_available():
            if ctypes.util.find_library("cuda") is None:
                raise QuasarError("no NVIDIA driver (libcuda) was found; install the driver")
            raise QuasarError("the NVIDIA driver shows no GPU; look at nvidia-smi, and at CUDA_VISIBLE_DEVICES")
        if index is not None:
            torch.cuda.set_device(index % torch.cuda.device_count())
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.name: str = properties.name
        self.identity = str(properties.uuid)
        self.sm: int = 10 * properties.major + properties.minor
        self.cache: int = properties.L2_cache_size
        self._stream = torch.cuda.Stream(self.torch_device)
        self.stream: int = self._stream.cuda_stream

    def free_memory(self) -> int:
        """Bytes."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the device."""
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies read and write while the host goes on; what they do is done after `wait`."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Between tensors of one shape, converting on the device; at most one of the two is pinned, of the same dtype then."""
        self.run(lambda: target.copy_(source, non_blocking=True))

    def zero(self, tensor: Tensor) -> None:
        self.run(tensor.zero_)

    def use(self) -> AbstractContextManager:
        """While it lasts, calls of this thread to CUDA are for this device, and operations of torch go to its stream."""
        return torch.cuda.stream(self._stream)

    def run(self, work: Callable[[], object]) -> None:
        """Operations of torch."""
        with self.use():
            work()

    def wait(self) -> None:
        """Until all that was asked for is done. Raises what went wrong on the device."""
        self._stream.synchronize()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """A CUDA graph of what `work` gives to the stream, none of which is done now; calling it does that again. `work` has run
        before."""
        graph = torch.cuda.CUDAGraph()
        with self.use():
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the device meanwhile
            try:
                work()
            finally:
                graph.capture_end()

        return lambda: self.run(graph.replay)
