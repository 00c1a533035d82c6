"""The native operations on numpy arrays, with the signatures of `quasar_trt.plugins.reference`.

The engine calls the same kernels from its own native step; these wrappers exist so that one table of tests can hold them to
the reference, and for use outside an engine. `isa` names an instruction set of `isa_names()`; "" is the best one here.
"""

from __future__ import annotations

import importlib.util

import numpy as np

from quasar_trt.plugins.packing import pack_vector, pack_weight, padded

try:
    from quasar_trt.plugins import _native
except ImportError as error:
    _native = None
    _built = importlib.util.find_spec("quasar_trt.plugins._native") is not None
    _why = f"cannot be loaded ({error})" if _built else "was not built"
    UNAVAILABLE: str | None = (
        f"the native extension {_why}; with a C++ compiler on the PATH, install again: pip install --force-reinstall --no-deps -e . (in the clone)"
    )
else:
    UNAVAILABLE = None


def isa_names() -> list[str]:
    """Instruction sets compiled in and runnable on this processor, best first; empty without the native extension."""
    return _native.isa_names() if _native else []


def decoder(shape: dict, tensors: dict[str, np.ndarray], pool, isa: str, collectives: dict | None):
    """The native decoder that `quasar_trt.engines.cpu` drives, over packed tensors and a thread pool that it keeps alive.

    collectives: name -> callable on an array, as plugins/csrc/bindings.cpp uses them; None for a single rank.
    """
    return _native.Decoder(shape, tensors, pool, isa, collectives)


def _vector(vector, size: int, what: str) -> np.ndarray | None:
    """Padded float32; the native code trusts sizes, so they are checked here."""
    if vector is None:
        return None
    if np.shape(vector) != (size,):
        raise ValueError(f"{what} has shape {np.shape(vector)}; expected ({size},)")
    return pack_vector(np.asarray(vector, np.float32))


def padded_rows(x: np.ndarray) -> np.ndarray:
    """[rows, n] -> [rows, padded n], padded with zeros, as kernels read them."""
    return np.ascontiguousarray(np.pad(x, ((0, 0), (0, padded(x.shape[1]) - x.shape[1]))))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, isa: str = "") -> np.ndarray:
    """x [rows, n] float32, weight [n] float32 -> [rows, n] float32."""
    n = x.shape[1]
    return _native.rms_norm(padded_rows(x), _vector(weight, n, "weight"), eps, n, isa)[:, :n]


def quantize_8(x: np.ndarray, isa: str = "") -> tuple[np.ndarray, np.ndarray]:
    """x [rows, k] float32 -> (codes int8 [rows, k], scale float32 [rows])."""
    q, scale = _native.quantize8(padded_rows(x), None, 0, isa)
    return q[:, : x.shape[1]], scale


def quantize_16(x: np.ndarray, isa: str = "") -> tuple[np.ndarray, np.ndarray]:
    """x [rows, k] float32 -> (codes int16 [rows, k], scale float32 [rows])."""
    q, scale = _native.quantize16(padded_rows(x), None, 0, isa)
    return q[:, : x.shape[1]], scale


def smooth_quantize(
    x: np.ndarray, inv_smoother: np.ndarray, hadamard: int = 0, activations: int = 8, isa: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, k] float32, inv_smoother [k] float32 -> (codes int8, or int16 for 16-bit activations [rows, k], scale [rows]).

    hadamard: columns of each block that is transformed after the smoothing; 0 for none.
    """
    k = x.shape[1]
    if hadamard and (hadamard < 0 or hadamard & (hadamard - 1) or k % hadamard):
        raise ValueError(
            f"a Hadamard block has {hadamard} columns; allowed: a power of two that divides the input's {k}"
        )
    kernel = {8: _native.quantize8, 16: _native.quantize16}[activations]
    q, scale = kernel(padded_rows(x), _vector(np.asarray(inv_smoother), k, "inv_smoother"), hadamard, isa)
    return q[:, :k], scale


def rms_norm_quantize(
    x: np.ndarray, weight: np.ndarray, eps: float, activations: int = 8, isa: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """RMSNorm whose weight carries the smoother, then quantization per row."""
    return {8: quantize_8, 16: quantize_16}[activations](rms_norm(x, weight, eps, isa), isa)


def silu_mul_smooth_quantize(
    gate: np.ndarray,
    up: np.ndarray,
    inv_smoother: np.ndarray,
    hadamard: int = 0,
    activations: int = 8,
    isa: str = "",
) -> tuple[np.ndarray, np.ndarray]:
    """`smooth_quantize` of silu(gate) * up; gate and up [rows, k] float32."""
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {gate.shape}, up {up.shape}; they must be equal")
    product = _native.silu_mul(padded_rows(gate), padded_rows(up), isa)[:, : gate.shape[1]]
    return smooth_quantize(product, inv_smoother, hadamard, activations, isa)


def thread_pool(threads: int):
    """Threads for decoders, `sum_words` and `packed_linear`, for one of them at a time. Raises RuntimeError where the system gives no more."""
    return _native.ThreadPool(threads)


def sum_words(words: np.ndarray, pool) -> int:
    """Reads words uint64 [n] with all threads of the pool, as fast as memory gives them; returns their sum modulo 2^64."""
    return _native.sum_words(words, pool)


def packed_linear(kind: str, x, scale, weight, weight_scale, k: int, pool) -> np.ndarray:
    """The linear `kind` ("w8a8", "w8a16" or "bf16") of a packed weight, its blocks shared among the pool's threads.

    x [rows, padded k] as the linear of that name takes it; scale f32 [rows] and weight_scale f32 [padded n], or None for
    bf16 -> float32 [rows, padded n]. Sizes are trusted.
    """
    return getattr(_native, f"linear_{kind}")(x, scale, weight, weight_scale, None, k, "", pool)


def head_linear(x: np.ndarray, weight, weight_scale, n: int, pool, isa: str = "") -> np.ndarray:
    """x [rows, k] float32 through a packed weight [n, k]: BF16, or with a weight_scale (f32 [padded n]) INT8, which reads 16-bit codes of x
    -> float32 [rows, n]. Sizes are trusted."""
    kind, scale, k = "bf16", None, x.shape[1]
    if weight_scale is not None:
        kind = "w8a16"
        x, scale = quantize_16(x, isa)
    return packed_linear(kind, padded_rows(x), scale, weight, weight_scale, k, pool)[:, :n]


def _linear(kernel, x, scale, weight, weight_scale, bias, isa) -> np.ndarray:
    n, k = weight.shape
    if x.shape[1] != k:
        raise ValueError(f"the input has {x.shape[1]} columns, the weight {k}; they must be equal")
    vectors = [_vector(scale, len(x), "scale"), _vector(weight_scale, n, "weight_scale"), _vector(bias, n, "bias")]
    return kernel(padded_rows(x), vectors[0], pack_weight(weight), *vectors[1:], k, isa, None)[:, :n]


def w8a8_linear(q, scale, weight, weight_scale, bias=None, isa: str = "") -> np.ndarray:
    """q int8 [rows, k], scale f32 [rows], weight int8 [n, k], weight_scale and bias f32 [n] -> float32 [rows, n]."""
    return _linear(_native.linear_w8a8, q, scale, weight, weight_scale, bias, isa)


def w8a16_linear(q, scale, weight, weight_scale, bias=None, isa: str = "") -> np.ndarray:
    """As `w8a8_linear` with q int16; the sum is exact."""
    return _linear(_native.linear_w8a16, q, scale, weight, weight_scale, bias, isa)


def bf16_linear(x: np.ndarray, weight: np.ndarray, bias=None, isa: str = "") -> np.ndarray:
    """x float32 [rows, k], weight uint16 bits of bfloat16 [n, k] -> float32 [rows, n]."""
    return _linear(_native.linear_bf16, x, None, weight, None, bias, isa)
