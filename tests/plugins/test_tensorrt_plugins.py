"""The quick plugins under TensorRT's own plugin layer on a double of its library. Their kernels are not executed here."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
from tensorrt_double import DataType, Layer, plugin_layer, tensorrt_double

from quasar_trt.plugins import aot, triton_kernels

BF16, FP32, INT8 = DataType.BF16, DataType.FLOAT, DataType.INT8
K, N = 1536, 100
SIZES = {"batch": 3, "tokens": 7}
ROWS = 21
X = (("batch", "tokens", K), BF16)
VECTOR = ((K,), FP32)


@pytest.fixture(scope="module")
def plugin():
    with tensorrt_double() as module:
        importlib.import_module("quasar_trt.plugins.tensorrt")
        yield module


def quantizing(plugin, name: str, *inputs, activations: int = 8, sm: int = 90, **attributes) -> Layer:
    return plugin_layer(plugin, name, inputs, {**attributes, "activations": activations, "sm": sm}, SIZES)


def linear(plugin, bits: int = 8, bias: bool = False, output: str = "bfloat16", tile: int = 16) -> Layer:
    inputs = [(("batch", "tokens", K * bits // 8), INT8), (("batch", "tokens"), FP32), ((N, K), INT8), ((N,), FP32)]
    inputs += [((N,), BF16)] if bias else []
    name, attributes = "linear_bias" if bias else "linear", {"activations": bits, "output": output, "sm": 80}
    return plugin_layer(plugin, name, inputs, attributes, SIZES, tile)


def parameters(layer: Layer) -> list[str]:
    """ "pointer" or "int32" of each parameter of the entry."""
    inside = re.search(rf"\.visible \.entry {layer.kernel}\((.*?)\)", layer.ptx, re.DOTALL)[1]
    return ["int32" if ".u32" in parameter else "pointer" for parameter in inside.split(",")]


QUANTIZING = {
    "smooth_quantize": ((X, VECTOR), {"hadamard": 64}),
    "silu_mul_smooth_quantize": ((X, X, VECTOR), {"hadamard": 512}),
    "rms_norm_quantize": ((X, ((K,), BF16)), {"eps": 1e-5}),
}


@pytest.mark.parametrize("name", QUANTIZING)
def test_quantizing_plugins_give_codes_and_a_scale_per_row(name, plugin):
    inputs, attributes = QUANTIZING[name]
    layer = quantizing(plugin, name, *inputs, **attributes)
    assert layer.outputs == [((3, 7, K), INT8), ((3, 7), FP32)]
    assert layer.kernel == name and ".target sm_90a" in layer.ptx
    assert layer.grid == (ROWS, 1, 1) and layer.scalars == []
    assert parameters(layer) == ["pointer"] * (len(inputs) + 2)


def test_sixteen_bit_codes_take_two_bytes_each(plugin):
    layer = quantizing(plugin, "smooth_quantize", X, VECTOR, hadamard=0, activations=16)
    assert layer.outputs == [((3, 7, 2 * K), INT8), ((3, 7), FP32)]


def test_the_kernel_is_compiled_for_the_type_of_the_input(plugin):
    bf16, fp32 = (quantizing(plugin, "smooth_quantize", (X[0], kind), VECTOR, hadamard=0).ptx for kind in (BF16, FP32))
    assert bf16 != fp32


@pytest.mark.parametrize(
    ("bits", "bias", "output"), [(8, False, "bfloat16"), (8, True, "float32"), (16, True, "bfloat16")]
)
def test_the_linear_is_launched_over_tiles_of_rows_and_channels(bits, bias, output, plugin):
    layer = linear(plugin, bits, bias, output)
    assert layer.outputs == [((3, 7, N), {"bfloat16": BF16, "float32": FP32}[output])]
    assert layer.grid == (2, 7, 1)  # 21 rows in tiles of 16, 100 channels in tiles of 16
    assert layer.scalars == [ROWS]
    assert parameters(layer) == [*["pointer"] * (5 if bias else 4), "int32", "pointer"]


@pytest.mark.parametrize(("tile", "grid"), [(32, (1, 4, 1)), (64, (1, 2, 1)), (128, (1, 2, 1))])
def test_a_tactic_is_the_rows_of_a_tile(tile, grid, plugin):
    layer = linear(plugin, tile=tile)
    assert layer.tactics == [16, 32, 64, 128]
    assert layer.grid == grid


def test_threads_and_shared_memory_are_those_of_the_compiled_kernel(plugin):
    from quasar_trt.plugins import triton_launch

    for tile in triton_launch.TILES:
        layer = linear(plugin, tile=tile)
        kernel = aot.compile_kernel(triton_launch.linear(N, K, 8, False, tile), {"y": "*bf16"}, 80)
        assert (layer.block, layer.shared) == ((kernel.threads, 1, 1), kernel.shared)
        assert f".reqntid {kernel.threads}\n" in layer.ptx and layer.shared > 0


def test_the_kernels_take_what_tensorrt_passes_in_its_order(plugin):
    """Input tensors as registered, then the scalar, then the outputs."""
    outputs = {"linear": ["rows", "y"], "linear_bias": ["rows", "y"]}
    for name in (*QUANTIZING, "linear", "linear_bias"):
        registered = getattr(plugin.op.quasar, name).input_tensor_names
        kernel = getattr(triton_kernels, name.removesuffix("_bias"))
        taken = [parameter for parameter in kernel.arg_names if parameter.islower()]
        taken = [parameter for parameter in taken if name != "linear" or parameter != "bias"]
        assert taken == [*registered, *outputs.get(name, ["q", "scale"])]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smooth_quantize", {(BF16, FP32, INT8, FP32), (FP32, FP32, INT8, FP32)}),
        ("silu_mul_smooth_quantize", {(BF16, BF16, FP32, INT8, FP32), (FP32, FP32, FP32, INT8, FP32)}),
        ("rms_norm_quantize", {(x, weight, INT8, FP32) for x in (BF16, FP32) for weight in (BF16, FP32)}),
    ],
)
def test_accepted_types(name, expected, plugin):
    inputs, attributes = QUANTIZING[name]
    assert set(quantizing(plugin, name, *inputs, **attributes).combinations) == expected


def test_the_linears_accept_bf16_and_fp32_outputs(plugin):
    codes = (INT8, FP32, INT8, FP32)
    assert set(linear(plugin).combinations) == {(*codes, BF16), (*codes, FP32)}
    assert len(set(linear(plugin, bias=True).combinations)) == 4


def test_a_vector_of_another_length_is_refused(plugin):
    with pytest.raises(ValueError, match="an input has 1536 columns, its vector 1024; they must be equal"):
        quantizing(plugin, "smooth_quantize", X, ((1024,), FP32), hadamard=0)


def test_codes_of_another_width_are_refused(plugin):
    inputs = [((5, K), INT8), ((5,), FP32), ((N, K), INT8), ((N,), FP32)]
    attributes = {"activations": 16, "output": "float32", "sm": 80}
    with pytest.raises(ValueError, match="1536 bytes per row; 1536 columns of 16-bit codes are expected"):
        plugin_layer(plugin, "linear", inputs, attributes, {}, 16)


def test_an_unknown_compute_capability_is_refused(plugin):
    with pytest.raises(ValueError, match="compute capability 75; one of: 80, 86, 89, 90, 100, 120"):
        quantizing(plugin, "smooth_quantize", X, VECTOR, hadamard=0, sm=75)


def test_without_tensorrt_the_import_says_how_to_install_it():
    code = "import sys; sys.modules['tensorrt'] = None; import quasar_trt.plugins.tensorrt"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: TensorRT cannot be imported") and "pip install 'quasar-trt[tensorrt]'" in last
