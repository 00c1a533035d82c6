"""What the GPU kernels take on each kind of GPU, as `quasar-trt info --kernels` shows it; compiled without a GPU."""

from __future__ import annotations

import subprocess

from quasar_trt.errors import QuasarError
from quasar_trt.tables import FigureTable

# Of a layer of an 8B model: hidden size 4096, MLP 12288, heads of 128.
_HIDDEN, _MLP, _HEAD, _BLOCK = 4096, 12288, 128, 512


def kernel_table() -> FigureTable:
    """Compiles every kernel for every compute capability, in half a minute or so.

    Raises QuasarError where Triton or its ptxas is missing, and for kernels that do not compile.
    """
    try:
        from quasar_trt.plugins import aot
    except ImportError as error:
        raise QuasarError(
            f"the GPU kernels cannot be compiled: {error}; install Triton: pip install 'quasar-trt[triton]'"
        ) from None
    try:
        rows = [
            (name, *(_cell(launch, floats, sm) for sm in aot.PTX_VERSIONS))
            for name, (launch, floats) in layer_kernels().items()
        ]
    except subprocess.CalledProcessError as error:
        raise QuasarError(f"ptxas refused a kernel: {error.stderr.strip().splitlines()[0]}") from None
    except RuntimeError as error:
        raise QuasarError(f"the GPU kernels cannot be compiled: {str(error).splitlines()[0]}") from None
    return FigureTable(
        "GPU kernels",
        ("kernel", *(f"sm_{sm}" for sm in aot.PTX_VERSIONS)),
        rows,
        "Registers per thread/KiB of shared memory per block+bytes that a thread spills, if any. (n): Hadamard blocks of n columns. "
        "Linears: rows of a tile, bits of the activations.",
    )


def layer_kernels() -> dict:
    """Name -> (launch, types that it leaves open), each of the sizes that a layer has."""
    from quasar_trt.plugins import triton_launch as launches

    linears = {
        f"linear, {tile} rows, {bits} bits": (
            launches.linear(_HIDDEN, _HIDDEN, bits, bias=False, tile=tile),
            {"y": "*bf16"},
        )
        for bits in (8, 16)
        for tile in launches.TILES
    }
    return {
        "rms_norm_quantize": (launches.rms_norm_quantize(_HIDDEN, 1e-6, 8), {"x": "*bf16", "weight": "*bf16"}),
        "smooth_quantize": (launches.smooth_quantize(_HIDDEN, True, 0, 8), {"x": "*bf16"}),
        f"smooth_quantize ({_HEAD})": (launches.smooth_quantize(_HIDDEN, True, _HEAD, 8), {"x": "*bf16"}),
        f"silu_mul_smooth_quantize ({_BLOCK})": (
            launches.silu_mul_smooth_quantize(_MLP, _BLOCK, 8),
            {"gate": "*bf16", "up": "*bf16"},
        ),
        **linears,
    }


def _cell(launch, floats: dict[str, str], sm: int) -> str:
    from quasar_trt.plugins import aot

    _, taken = aot.assemble(aot.compile_kernel(launch, floats, sm))
    spilled = f"+{taken.spilled}" if taken.spilled else ""
    return f"{taken.registers}/{taken.shared / 1024:.0f}{spilled}"
