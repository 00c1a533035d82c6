"""Rotary position embedding tables, the one source for every engine.

Formulas: RoFormer (arXiv 2104.09864) and, for `llama3`, the frequency rescaling that Llama 3.1 was released with.
Products are rounded to float32 in the order Hugging Face rounds them, so positions in the thousands agree too.
"""

from __future__ import annotations

import math

import numpy as np

from quasar_trt.errors import QuasarError, unknown
from quasar_trt.model_config import ModelConfig

ROPE_TYPES = ("default", "linear", "llama3")


def rope_type(scaling: dict | None) -> str:
    """The scaling's type under either spelling ("rope_type", or "type" in older configs).

    Raises QuasarError when the type is not one this product computes.
    """
    name = "default" if not scaling else scaling.get("rope_type") or scaling.get("type") or "default"
    if name not in ROPE_TYPES:
        raise unknown("rope type", name, ROPE_TYPES)
    return name


def _number(scaling: dict, key: str) -> float:
    if not isinstance(scaling.get(key), int | float):
        raise QuasarError(f"rope scaling '{rope_type(scaling)}' needs a number for '{key}', found {scaling.get(key)!r}")
    return float(scaling[key])


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """float32 [head_size / 2]: base^(-2i / head_size), rescaled as `rotary_scaling` says."""
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    frequencies = (1.0 / np.power(np.float32(config.rotary_base), exponents)).astype(np.float32)
    scaling = config.rotary_scaling
    kind = rope_type(scaling)
    if kind == "linear":
        frequencies = frequencies / np.float32(_number(scaling, "factor"))
    elif kind == "llama3":
        factor = _number(scaling, "factor")
        low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
        original = _number(scaling, "original_max_position_embeddings")
        wavelengths = 2 * math.pi / frequencies.astype(np.float64)
        smooth = (original / wavelengths - low) / (high - low)
        blended = (1 - smooth) * frequencies / factor + smooth * frequencies
        scaled = np.where(wavelengths > original / low, frequencies / factor, blended)
        frequencies = np.where(wavelengths < original / high, frequencies, scaled)
    return frequencies.astype(np.float32)


def rope_tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each float32 [length, head_size / 2], for positions 0 .. length - 1.

    Column i rotates the pair (x[i], x[i + head_size / 2]) of each head.
    """
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse_frequencies(config)[None, :]
    return np.cos(angles), np.sin(angles)
