"""How the Triton kernels are launched: constants, types and the sizes of tiles, for torch and for TensorRT alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton

from quasar_trt.plugins import triton_kernels

LIMITS = {8: 127, 16: 32767}  # bits of an activation -> its largest code


class Tile(NamedTuple):
    """Of the linear's output: channels; and how it is computed: weight columns per iteration, warps, stages of the pipeline."""

    channels: int
    columns: int
    warps: int
    stages: int


# Rows of a tile -> the tile. All fit into 48 KiB of shared memory, which a kernel gets without asking the driver for more.
# That of few rows streams weights: a program reads 512 columns of 16 channels while the next 512 are on their way.
TILES = {16: Tile(16, 512, 2, 3), 32: Tile(32, 256, 4, 3), 64: Tile(64, 128, 4, 2), 128: Tile(64, 64, 8, 3)}

WIDEST_ROW = 8192  # that registers and, for a Hadamard transform, shared memory hold at once
PART_OF_WIDER_ROW = 4096  # Hadamard blocks do not reach across parts
_VALUES_PER_WARP = 512


@dataclass(frozen=True)
class Launch:
    """A kernel and what its launches have in common; hashable, so that compiled code can be kept by it.

    constants: of its parameters, None for an absent tensor. types: as Triton writes them, of the parameters whose type does not
    follow the model's float type.
    """

    kernel: triton.runtime.JITFunction
    constants: tuple[tuple[str, Any], ...]
    types: tuple[tuple[str, str], ...]
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, object]:
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}


def _quantizing(kernel, k: int, activations: int, constants: Mapping[str, object], types: Mapping[str, str]) -> Launch:
    width = triton.next_power_of_2(k) if k <= WIDEST_ROW else PART_OF_WIDER_ROW
    constants = {"K": k, "WIDTH": width, "LIMIT": LIMITS[activations], **constants}
    types = {"q": f"*i{activations}", "scale": "*fp32", **types}
    warps = min(max(width // _VALUES_PER_WARP, 1), 16)
    return Launch(kernel, tuple(constants.items()), tuple(types.items()), warps, stages=1)


def _smoothing(kernel, k: int, smoother: bool, hadamard: int, activations: int) -> Launch:
    if hadamard and (hadamard < 0 or hadamard & (hadamard - 1) or k % hadamard or hadamard > PART_OF_WIDER_ROW):
        raise ValueError(
            f"a Hadamard block has {hadamard} columns; allowed: a power of two that divides the input's {k}, up to {PART_OF_WIDER_ROW}"
        )
    absent = {} if smoother else {"inv_smoother": None}
    types = {"inv_smoother": "*fp32"} if smoother else {}
    return _quantizing(kernel, k, activations, {"HADAMARD": hadamard, **absent}, types)


def smooth_quantize(k: int, smoother: bool, hadamard: int, activations: int) -> Launch:
    """For rows of k columns; one program per row. smoother: whether the kernel is given an inv_smoother.

    Raises ValueError for Hadamard blocks that do not divide the row.
    """
    return _smoothing(triton_kernels.smooth_quantize, k, smoother, hadamard, activations)


def silu_mul_smooth_quantize(k: int, hadamard: int, activations: int) -> Launch:
    """As `smooth_quantize`."""
    return _smoothing(triton_kernels.silu_mul_smooth_quantize, k, True, hadamard, activations)


def rms_norm_quantize(k: int, eps: float, activations: int) -> Launch:
    """For rows of k columns; one program per row."""
    return _quantizing(triton_kernels.rms_norm_quantize, k, activations, {"EPS": eps}, {})


def tile_rows(rows: int) -> int:
    """The key of `TILES` for so many rows: the smallest that holds them, or the largest."""
    return next((tile for tile in TILES if rows <= tile), max(TILES))


def linear(n: int, k: int, activations: int, bias: bool, tile: int) -> Launch:
    """For a weight [n, k]; one program per `tile` rows and per the tile's channels, in this order of the grid's axes.

    activations: bits of the codes; an iteration over 16-bit ones takes half the columns, for the sake of registers.
    """
    shape = TILES[tile]
    constants = {
        "N": n,
        "K": k,
        "TILE_ROWS": tile,
        "TILE_N": shape.channels,
        "TILE_K": shape.columns * 8 // activations,
    }
    constants |= {} if bias else {"bias": None}
    types = {"q": f"*i{activations}", "scale": "*fp32", "weight": "*i8", "weight_scale": "*fp32", "rows": "i32"}
    return Launch(triton_kernels.linear, tuple(constants.items()), tuple(types.items()), shape.warps, shape.stages)
