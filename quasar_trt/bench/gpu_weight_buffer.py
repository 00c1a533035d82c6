"""Random weights in the memory of a GPU, far more than its cache holds, and the linears that read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from quasar_trt.bench.curve import Curve
from quasar_trt.bench.weight_buffer import Layer
from quasar_trt.engines.cuda_device import CudaDevice

_PATTERN = 1 << 20  # weights drawn; the buffer repeats them


class GpuWeightBuffer:
    """One piece of memory that the bandwidth probe adds up and each linear reads as weights of its own kind.

    layer: what is laid out in it, again and again. least_bytes: it is no smaller, and holds one layer of any kind. operations:
    with the names of `quasar_trt.plugins.reference`, on tensors of the device.

    A call takes microseconds, less than launching it from Python, so a pass is captured into a CUDA graph and replayed.
    """

    def __init__(self, layer: Layer, least_bytes: int, device: CudaDevice, operations: ModuleType):
        self._layer = layer
        self._device = device
        self._operations = operations
        self._values = sum(n * k for k, n in layer.items())
        self.nbytes = -(-max(least_bytes, 2 * self._values) // 256) * 256
        self._weights = device.empty((self.nbytes // 2,), torch.bfloat16)
        self._graphs: dict[object, Callable[[], None]] = {}
        self._do(self._fill)

    def read(self) -> None:
        """Reads all of it."""
        self._replay("read", partial(torch.sum, self._weights.view(torch.float32)))

    def curve(self, kind: str, rows: tuple[int, ...]) -> Curve:
        """The linears of as many layers as there is room for, one after the other, as one pass. kind: a key of `KINDS`."""
        pieces = self._pieces(torch.bfloat16 if kind == "bf16" else torch.int8)
        inputs: dict[int, tuple[Tensor, ...]] = {}
        self._do(lambda: inputs.update({k: self._input(kind, max(rows), k) for k in self._layer}))
        vectors = {k: () if kind == "bf16" else (self._ones[:n],) for k, n in self._layer.items()}
        linear = {
            "bf16": functional.linear,
            "w8a8": self._operations.w8a8_linear,
            "w8a16": self._operations.w8a16_linear,
        }[kind]

        def work(count: int) -> None:
            for weight in pieces:
                k = weight.shape[1]
                linear(*(part[:count] for part in inputs[k]), weight, *vectors[k])

        def run(count: int) -> None:
            self._replay((kind, count), partial(work, count))

        return Curve(f"{kind} linears", sum(weight.nbytes for weight in pieces), rows, run)

    def _fill(self) -> None:
        normals = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0)) * 0.02
        for part in self._weights.split(_PATTERN):
            part.copy_(normals[: len(part)])
        self._ones = torch.ones(max(self._layer.values()), device=self._weights.device)

    def _input(self, kind: str, rows: int, k: int) -> tuple[Tensor, ...]:
        """(x bf16 [rows, k],), or (codes, scale) of it."""
        x = torch.randn(rows, k, device=self._weights.device).bfloat16()
        if kind == "bf16":
            return (x,)
        return self._operations.quantize_8(x) if kind == "w8a8" else self._operations.quantize_16(x)

    def _pieces(self, dtype: torch.dtype) -> list[Tensor]:
        """[n, k] of every layer in the order of memory."""
        weights, start, pieces = self._weights.view(dtype), 0, []
        for _ in range(len(weights) // self._values):
            for k, n in self._layer.items():
                pieces.append(weights[start : start + n * k].view(n, k))
                start += n * k
        return pieces

    def _do(self, work: Callable[[], object]) -> None:
        self._device.run(work)
        self._device.wait()

    def _replay(self, key: object, work: Callable[[], object]) -> None:
        if key not in self._graphs:
            self._do(work)  # compiles its kernels
            self._graphs[key] = self._device.capture(work)
        self._graphs[key]()
        self._device.wait()
