"""The few calls to CUDA that the engine of plans makes, through torch."""

from __future__ import annotations

import ctypes.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quasar_trt.errors import QuasarError


class CudaDevice:
    """The current NVIDIA GPU. Raises QuasarError when there is none that torch can use."""

    def __init__(self):
        if torch.version.cuda is None:
            raise QuasarError(f"torch {torch.__version__} is built without CUDA; a GPU needs a CUDA build of it")
        if not torch.cuda.is_available():
            if ctypes.util.find_library("cuda") is None:
                raise QuasarError("no NVIDIA driver (libcuda) was found; install the driver")
            raise QuasarError("the NVIDIA driver shows no GPU; look at nvidia-smi, and at CUDA_VISIBLE_DEVICES")
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.name: str = properties.name
        self.sm: int = 10 * properties.major + properties.minor
        self._stream = torch.cuda.Stream(self.torch_device)

    def free_memory(self) -> int:
        """Bytes."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    @contextmanager
    def stream(self) -> Iterator[int]:
        """The handle of the stream that work of this block goes to, torch's too."""
        with torch.cuda.stream(self._stream):
            yield self._stream.cuda_stream
