"""Rotary position embedding tables, the one source for every engine.

Formulas: RoFormer (arXiv 2104.09864) and, for `llama3`, the frequency rescaling that Llama 3.1 was released with.
Products are rounded to float32 in the order Hugging Face rounds them, so positions in the thousands agree too.
"""

from __future__ import annotations

import math

import numpy as np

from quasar_trt.errors import QuasarError, unknown
from quasar_trt.model_config import ModelConfig, positive_number

ROPE_TYPES = ("default", "linear", "llama3")


def rope_type(scaling: dict | None) -> str:
    """The scaling's type under either spelling ("rope_type", or "type" in older configs).

    Raises QuasarError when the type is not one this product computes.
    """
    given = [scaling[key] for key in ("rope_type", "type") if scaling and scaling.get(key) is not None]
    name = given[0] if given else "default"
    if name not in ROPE_TYPES:
        raise unknown("rope type", str(name), ROPE_TYPES)
    return name


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """float32 [head_size / 2]: base^(-2i / head_size), rescaled as `rotary_scaling` says.

    Raises QuasarError for a type that is not computed here and for parameters that are missing or make no sense.
    """

    def number(key: str) -> float:
        return positive_number(f"'{key}' of rope type '{kind}'", scaling.get(key))

    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    frequencies = (1.0 / np.power(np.float32(config.rotary_base), exponents)).astype(np.float32)
    scaling = config.rotary_scaling
    kind = rope_type(scaling)
    if kind == "linear":
        frequencies = frequencies / np.float32(number("factor"))
    elif kind == "llama3":
        factor = number("factor")
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise QuasarError(
                f"'low_freq_factor' of rope type 'llama3' is {low}; it must be below 'high_freq_factor', {high}"
            )
        original = number("original_max_position_embeddings")
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
