"""The implementations of the quantized operations, called alike: operation, torch tensors on the CPU in, the same out.

The native kernels come once per instruction set that runs here. Triton's run on the GPU where there is one; elsewhere its
interpreter runs them in a process of its own, since it is switched on before Triton is imported, for all kernels.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import torch

from quasar_trt.plugins import native

Implementation = Callable[..., object]


def _map(value, convert: Callable):
    """`convert` of the tensors or arrays that an operation takes or returns."""
    return tuple(convert(part) for part in value) if isinstance(value, tuple) else convert(value)


def _native(operation: str, *arguments, isa: str):
    arrays = [a.float().numpy() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
    arrays = [a.numpy() if torch.is_tensor(a) else a for a in arrays]
    return _map(getattr(native, operation)(*arrays, isa=isa), torch.from_numpy)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _run_triton(device: str, operation: str, arguments: tuple):
    from quasar_trt.plugins import triton

    moved = [a.to(device) if torch.is_tensor(a) else a for a in arguments]
    return _map(getattr(triton, operation)(*moved), lambda tensor: tensor.cpu())


@functools.cache
def _interpreter() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _interpret)


def _triton(operation: str, *arguments):
    if torch.cuda.is_available():
        return _run_triton("cuda", operation, arguments)
    return _interpreter().submit(_run_triton, "cpu", operation, arguments).result()


def triton_operations() -> SimpleNamespace:
    """Triton's, with the names that a model uses, for tensors on the CPU."""
    names = ("quantize_8", "quantize_16", "smooth_quantize", "w8a8_linear", "w8a16_linear")
    operations = SimpleNamespace(**{name: functools.partial(_triton, name) for name in names})
    operations.QUANTIZE = {8: operations.quantize_8, 16: operations.quantize_16}
    operations.LINEAR = {8: operations.w8a8_linear, 16: operations.w8a16_linear}
    return operations


IMPLEMENTATIONS: dict[str, Implementation] = {
    **{f"native {isa}": functools.partial(_native, isa=isa) for isa in native.isa_names()},
    "triton": _triton,
}
