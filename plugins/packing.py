"""The order in which the native kernels read weights.

A linear's output channels are cut into blocks of 16, and a block's weights are stored in the order in which the kernels
read them, so a pass is one sequential read:

    INT8  [n / 16, k / 4, 16, 4]   64 bytes hold 4 inputs of 16 output channels
    BF16  [n / 16, k / 2, 16, 2]   64 bytes hold 2 inputs of 16 output channels (bfloat16 as uint16 bits)

n and k are padded with zeros. Vectors (norm weights, scales, biases, inverse smoothers) are float32, padded to 16.
"""

from __future__ import annotations

import numpy as np

BLOCK = 16


def padded(size: int, multiple: int = BLOCK) -> int:
    return -(-size // multiple) * multiple


def packed_shape(rows: int, columns: int, quantized: bool) -> tuple[int, int, int, int]:
    """Shape of a packed [rows, columns] weight."""
    group = 4 if quantized else 2
    return padded(rows) // BLOCK, padded(columns, group) // group, BLOCK, group


def pack_weight(weight: np.ndarray) -> np.ndarray:
    """[n, k] int8, or uint16 bits of bfloat16 -> packed, see the module."""
    blocks, groups, _, group = packed_shape(*weight.shape, quantized=weight.dtype == np.int8)
    full = np.zeros((blocks * BLOCK, groups * group), weight.dtype)
    full[: weight.shape[0], : weight.shape[1]] = weight
    return np.ascontiguousarray(full.reshape(blocks, BLOCK, groups, group).transpose(0, 2, 1, 3))


def pack_vector(vector: np.ndarray) -> np.ndarray:
    """float32 of any shape -> float32 [padded size]."""
    flat = vector.reshape(-1)
    return np.pad(flat, (0, padded(flat.size) - flat.size))


def interleave(fc: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """Alternates the blocks of 16 rows of two arrays [n, ...] -> [2 * padded(n), ...]: fc, gate, fc, gate, ..."""
    tail = fc.shape[1:]
    both = np.zeros((padded(len(fc)) // BLOCK, 2, BLOCK, *tail), fc.dtype)
    for part, array in enumerate((fc, gate)):
        full = np.zeros((padded(len(fc)), *tail), fc.dtype)
        full[: len(array)] = array
        both[:, part] = full.reshape(-1, BLOCK, *tail)
    return both.reshape(-1, *tail)
