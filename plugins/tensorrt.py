"""The quantized operations as TensorRT quick plugins, `trtp.op.quasar.*`; importing this module registers them.

Each hands over PTX, so that an engine file carries its kernels and needs neither Python nor a library of ours. Tensors may have
any number of leading dimensions, together the rows; the last one is static. TensorRT has no INT16: 16-bit codes are an INT8
tensor with twice the columns. Attributes of all: sm, the compute capability to compile for.
"""

# No `from __future__ import annotations`: TensorRT reads classes from the annotations, not their names.

import numpy.typing  # noqa: F401 (TensorRT's plugin layer reads it off numpy, where numpy 1 has it only once it is imported)

try:
    import tensorrt as trt
    import tensorrt.plugin as trtp
except ImportError as error:
    raise ImportError(
        f"TensorRT cannot be imported ({error}); on a host with an NVIDIA GPU: pip install 'quasar-trt[tensorrt]'"
    ) from error

from quasar_trt.plugins import triton_launch
from quasar_trt.plugins.aot import compile_kernel
from quasar_trt.plugins.triton_launch import TILES, Launch

Implementation = tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]

_POINTERS = {trt.DataType.BF16: "*bf16", trt.DataType.FLOAT: "*fp32"}
OUTPUTS = {"bfloat16": trt.DataType.BF16, "float32": trt.DataType.FLOAT}


def _quantized(x: trtp.TensorDesc, activations: int) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
    """Shapes and types of the codes and of the scales."""
    *leading, k = x.shape_expr
    q = trtp.from_shape_expr((*leading, k * (activations // 8)), trt.DataType.INT8)
    return q, trtp.from_shape_expr(tuple(leading), trt.DataType.FLOAT)


def _columns(vector: trtp.TensorDesc, *inputs: trtp.TensorDesc) -> int:
    (k,) = vector.shape
    for x in inputs:
        if x.shape[-1] != k:
            raise ValueError(f"an input has {x.shape[-1]} columns, its vector {k}; they must be equal")
    return k


def _rows(scale: trtp.TensorDesc) -> trtp.ShapeExpr:
    return scale.shape_expr.numel()


def _implementation(
    launch: Launch, floats: dict[str, trtp.TensorDesc], sm: int, scalars: tuple[trtp.ShapeExpr, ...], *grid
) -> Implementation:
    """floats: the tensors whose type `launch` leaves open. grid: integers or expressions, x first."""
    kernel = compile_kernel(launch, {name: _POINTERS[tensor.dtype] for name, tensor in floats.items()}, sm)
    parameters = trtp.KernelLaunchParams(*grid, block_x=kernel.threads, shared_mem=kernel.shared)
    return kernel.name, kernel.ptx, parameters, trtp.SymIntExprs.from_tuple(scalars)


@trtp.register("quasar::smooth_quantize")
def smooth_quantize(
    x: trtp.TensorDesc, inv_smoother: trtp.TensorDesc, hadamard: int, activations: int, sm: int
) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
    """x [..., k] BF16 or FP32, inv_smoother [k] FP32 -> q INT8 [..., k], or [..., 2 k] for 16-bit activations, scale FP32 [...]."""
    return _quantized(x, activations)


@trtp.autotune("quasar::smooth_quantize")
def _smooth_quantize_types(x, inv_smoother, outputs) -> list[trtp.AutoTuneCombination]:
    return [trtp.AutoTuneCombination("BF16*FP32, FP32, INT8, FP32", "LINEAR")]


@trtp.aot_impl("quasar::smooth_quantize")
def _smooth_quantize_kernel(x, inv_smoother, hadamard, activations, sm, outputs, tactic) -> Implementation:
    launch = triton_launch.smooth_quantize(_columns(inv_smoother, x), True, hadamard, activations)
    return _implementation(launch, {"x": x}, sm, (), _rows(outputs[1]))


@trtp.register("quasar::silu_mul_smooth_quantize")
def silu_mul_smooth_quantize(
    gate: trtp.TensorDesc,
    up: trtp.TensorDesc,
    inv_smoother: trtp.TensorDesc,
    hadamard: int,
    activations: int,
    sm: int,
) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
    """As `smooth_quantize` of silu(gate) * up; gate and up [..., k], both BF16 or both FP32."""
    return _quantized(gate, activations)


@trtp.autotune("quasar::silu_mul_smooth_quantize")
def _silu_mul_smooth_quantize_types(gate, up, inv_smoother, outputs) -> list[trtp.AutoTuneCombination]:
    return [trtp.AutoTuneCombination("BF16|FP32, BF16|FP32, FP32, INT8, FP32", "LINEAR")]


@trtp.aot_impl("quasar::silu_mul_smooth_quantize")
def _silu_mul_smooth_quantize_kernel(
    gate, up, inv_smoother, hadamard, activations, sm, outputs, tactic
) -> Implementation:
    launch = triton_launch.silu_mul_smooth_quantize(_columns(inv_smoother, gate, up), hadamard, activations)
    return _implementation(launch, {"gate": gate, "up": up}, sm, (), _rows(outputs[1]))


@trtp.register("quasar::rms_norm_quantize")
def rms_norm_quantize(
    x: trtp.TensorDesc, weight: trtp.TensorDesc, eps: float, activations: int, sm: int
) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
    """x [..., k] and weight [k], each BF16 or FP32 -> codes and scales as `smooth_quantize`."""
    return _quantized(x, activations)


@trtp.autotune("quasar::rms_norm_quantize")
def _rms_norm_quantize_types(x, weight, outputs) -> list[trtp.AutoTuneCombination]:
    return [trtp.AutoTuneCombination("BF16*FP32, BF16*FP32, INT8, FP32", "LINEAR")]


@trtp.aot_impl("quasar::rms_norm_quantize")
def _rms_norm_quantize_kernel(x, weight, eps, activations, sm, outputs, tactic) -> Implementation:
    launch = triton_launch.rms_norm_quantize(_columns(weight, x), eps, activations)
    return _implementation(launch, {"x": x, "weight": weight}, sm, (), _rows(outputs[1]))


def _linear_output(scale: trtp.TensorDesc, weight: trtp.TensorDesc, output: str) -> trtp.TensorDesc:
    return trtp.from_shape_expr((*scale.shape_expr, weight.shape_expr[0]), OUTPUTS[output])


def _linear_types(*types: str) -> list[trtp.AutoTuneCombination]:
    # A tactic is the rows of a tile: each optimization profile gets the fastest for its own number of rows.
    return [trtp.AutoTuneCombination(", ".join(types), "LINEAR", list(TILES))]


def _linear_kernel(q, scale, weight, bias, activations, sm, y, tile) -> Implementation:
    n, k = weight.shape
    if q.shape[-1] != k * (activations // 8):
        raise ValueError(
            f"the input has {q.shape[-1]} bytes per row; {k} columns of {activations}-bit codes are expected"
        )
    rows, floats = _rows(scale), {"y": y} if bias is None else {"y": y, "bias": bias}
    launch = triton_launch.linear(n, k, activations, bias is not None, tile)
    return _implementation(launch, floats, sm, (rows,), trtp.cdiv(rows, tile), -(-n // TILES[tile].channels))


@trtp.register("quasar::linear")
def linear(
    q: trtp.TensorDesc,
    scale: trtp.TensorDesc,
    weight: trtp.TensorDesc,
    weight_scale: trtp.TensorDesc,
    activations: int,
    output: str,
    sm: int,
) -> trtp.TensorDesc:
    """q and scale as `smooth_quantize` gives them, weight INT8 [n, k], weight_scale FP32 [n] -> y [..., n] of `output`.

    output: "bfloat16" or "float32".
    """
    return _linear_output(scale, weight, output)


@trtp.autotune("quasar::linear")
def _linear_without_bias_types(q, scale, weight, weight_scale, outputs) -> list[trtp.AutoTuneCombination]:
    return _linear_types("INT8", "FP32", "INT8", "FP32", "BF16*FP32")


@trtp.aot_impl("quasar::linear")
def _linear_without_bias_kernel(
    q, scale, weight, weight_scale, activations, output, sm, outputs, tactic
) -> Implementation:
    return _linear_kernel(q, scale, weight, None, activations, sm, outputs[0], tactic)


@trtp.register("quasar::linear_bias")
def linear_bias(
    q: trtp.TensorDesc,
    scale: trtp.TensorDesc,
    weight: trtp.TensorDesc,
    weight_scale: trtp.TensorDesc,
    bias: trtp.TensorDesc,
    activations: int,
    output: str,
    sm: int,
) -> trtp.TensorDesc:
    """As `linear`, plus bias [n] BF16 or FP32."""
    return _linear_output(scale, weight, output)


@trtp.autotune("quasar::linear_bias")
def _linear_bias_types(q, scale, weight, weight_scale, bias, outputs) -> list[trtp.AutoTuneCombination]:
    return _linear_types("INT8", "FP32", "INT8", "FP32", "BF16*FP32", "BF16*FP32")


@trtp.aot_impl("quasar::linear_bias")
def _linear_bias_kernel(
    q, scale, weight, weight_scale, bias, activations, output, sm, outputs, tactic
) -> Implementation:
    return _linear_kernel(q, scale, weight, bias, activations, sm, outputs[0], tactic)
