"""Rotary position embedding tables, the one source for every engine.

Formulas: RoFormer (arXiv 2104.09864); for `llama3`, the frequency rescaling that Llama 3.1 was released with; for `yarn`,
YaRN (arXiv 2309.00071, section 3). `dynamic` is plain up to the original maximum and is not computed beyond it.
Products are rounded to float32 in the order Hugging Face rounds them, so positions in the thousands agree too.
"""

from __future__ import annotations

import math

import numpy as np

from quasar_trt.errors import QuasarError, unknown
from quasar_trt.model_config import ModelConfig, positive_number

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


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
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    frequencies = (1.0 / np.power(np.float32(config.rotary_base), exponents)).astype(np.float32)
    scaling = config.rotary_scaling
    kind = rope_type(scaling)
    if kind == "linear":
        frequencies = frequencies / np.float32(_number(config, "factor"))
    elif kind == "llama3":
        factor = _number(config, "factor")
        low, high = _number(config, "low_freq_factor"), _number(config, "high_freq_factor")
        if low >= high:
            raise QuasarError(
                f"'low_freq_factor' of rope type 'llama3' is {low}; it must be below 'high_freq_factor', {high}"
            )
        original = _number(config, "original_max_position_embeddings")
        wavelengths = 2 * math.pi / frequencies.astype(np.float64)
        smooth = (original / wavelengths - low) / (high - low)
        blended = (1 - smooth) * frequencies / factor + smooth * frequencies
        scaled = np.where(wavelengths > original / low, frequencies / factor, blended)
        frequencies = np.where(wavelengths < original / high, frequencies, scaled)
    elif kind == "yarn":
        kept = _yarn_kept(config)
        slow = 1.0 / (np.float32(_yarn_factor(config)) * np.power(np.float32(config.rotary_base), exponents))
        frequencies = slow * (1 - kept) + frequencies * kept
    return frequencies.astype(np.float32)


def attention_factor(config: ModelConfig) -> float:
    """What cos and sin are multiplied with: 1.0 except for `yarn`, which so sharpens attention over long contexts.

    Without an `attention_factor` of its own, m(`mscale`) / m(`mscale_all_dim`) where both are given and m(1) otherwise, with
    m(s) = 0.1 s ln(factor) + 1 for factors above 1, and 1 below.
    """
    scaling = config.rotary_scaling
    if rope_type(scaling) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return _number(config, "attention_factor")
    stretch = math.log(max(_yarn_factor(config), 1.0))
    if not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        return 0.1 * stretch + 1.0
    scales = (_number(config, "mscale"), _number(config, "mscale_all_dim"))
    numerator, denominator = (0.1 * scale * stretch + 1.0 for scale in scales)
    return numerator / denominator


def longest_sequence(config: ModelConfig) -> int:
    """The most tokens of a sequence: `dynamic` would change the rows before its original maximum when going beyond it."""
    if rope_type(config.rotary_scaling) != "dynamic":
        return config.max_position_embeddings
    return min(
        config.max_position_embeddings,
        int(_number(config, "original_max_position_embeddings", config.max_position_embeddings)),
    )


def rope_tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each float32 [length, head_size / 2], for positions 0 .. length - 1.

    Column i rotates the pair (x[i], x[i + head_size / 2]) of each head; both carry the attention factor.
    """
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse_frequencies(config)[None, :]
    factor = np.float32(attention_factor(config))
    return np.cos(angles) * factor, np.sin(angles) * factor


def _number(config: ModelConfig, key: str, default: float | None = None) -> float:
    """A parameter of the scaling; an absent or null one is `default`, when there is one."""
    value = config.rotary_scaling.get(key)
    name = f"'{key}' of rope type '{rope_type(config.rotary_scaling)}'"
    return positive_number(name, default if value is None else value)


def _yarn_original(config: ModelConfig) -> float:
    return _number(config, "original_max_position_embeddings", config.max_position_embeddings)


def _yarn_factor(config: ModelConfig) -> float:
    return _number(config, "factor", config.max_position_embeddings / _yarn_original(config))


def _yarn_kept(config: ModelConfig) -> np.ndarray:
    """float32 [head_size / 2]: 1 where a frequency is kept, 0 where it is divided by the factor, a ramp between.

    The ramp runs between the dimensions that turn `beta_fast` and `beta_slow` times over the original maximum.
    """
    size, base = config.head_size, config.rotary_base
    if base <= 1:
        raise QuasarError(f"rotary_base is {base}; rope type 'yarn' needs one above 1")

    def dimension(key: str, default: float) -> float:
        turns = _number(config, key, default)
        return size * math.log(_yarn_original(config) / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension("beta_fast", 32), dimension("beta_slow", 1)
    truncate = config.rotary_scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise QuasarError(f"'truncate' of rope type 'yarn' is {truncate!r}; it must be true or false")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low or 0.001  # as published: no division by zero when both ends fall together
    ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(span)
    return 1 - np.clip(ramp, 0, 1)
