"""A Hugging Face config.json as a `ModelConfig`; whatever cannot be honoured is refused, nothing is dropped."""

from __future__ import annotations

from quasar_trt.architectures import ARCHITECTURES
from quasar_trt.errors import QuasarError, unknown
from quasar_trt.model_config import ModelConfig, derived_head_size, positive_number, whole_number
from quasar_trt.rope import inverse_frequencies, rope_type

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


def model_config(values: dict, where: str) -> ModelConfig:
    """Raises QuasarError naming the file `where`, the key and its value."""
    try:
        return _model_config(values)
    except QuasarError as error:
        raise QuasarError(f"{where}: {error}") from None


def _model_config(values: dict) -> ModelConfig:
    architecture = _architecture(values)
    _refuse(values, architecture)
    missing = [key for key in _SIZES if key not in values]
    if missing:
        raise QuasarError(f"lacks {', '.join(missing)}")
    base, scaling = _rope(values)
    attention_bias = values.get("attention_bias") or False
    config = ModelConfig(
        architecture=architecture,
        **{key: values[key] for key in _SIZES},
        num_key_value_heads=_given(values, "num_key_value_heads", values["num_attention_heads"]),
        head_size=_head_size(values),
        max_position_embeddings=values.get("max_position_embeddings", 2048),
        norm_epsilon=positive_number("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
        rotary_base=base,
        rotary_scaling=scaling,
        qkv_bias=attention_bias,
        dense_bias=attention_bias,
        mlp_bias=values.get("mlp_bias") or False,
        tie_word_embeddings=values.get("tie_word_embeddings") or False,
    )
    inverse_frequencies(config)  # parameters that make no sense are refused here, not in an engine
    return config


def _given(values: dict, key: str, default):
    """The value, or `default` where it is absent or null."""
    return default if values.get(key) is None else values[key]


def _architecture(values: dict) -> str:
    names = values.get("architectures") or []
    if not isinstance(names, list):
        raise QuasarError(f"architectures is {names!r}; it must be a list of one of: {', '.join(ARCHITECTURES)}")
    if not names:
        raise QuasarError(f"names no architecture; 'architectures' must be one of: {', '.join(ARCHITECTURES)}")
    if names[0] not in list(ARCHITECTURES):
        raise unknown("architecture", str(names[0]), ARCHITECTURES)
    return names[0]


def _refuse(values: dict, architecture: str) -> None:
    """What changes the computation and is not supported."""
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise QuasarError(
            f"it has a quantization_config ({method or 'unknown method'}); build from the unquantized checkpoint instead"
        )
    experts = [key for key in _EXPERT_KEYS if values.get(key)]
    if experts:
        raise QuasarError(
            f"{architecture} with {experts[0]} = {values[experts[0]]}: mixtures of experts are not supported; use a dense model"
        )
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise QuasarError(f"hidden_act '{activation}' is not supported; allowed: silu")
    # A window counts as in use unless the config says otherwise, by `use_sliding_window` or by `layer_types`.
    window = values.get("sliding_window")
    kinds = values.get("layer_types") or []
    used = any(kind != "full_attention" for kind in kinds) if isinstance(kinds, list) else True
    if used or (window and not kinds and values.get("use_sliding_window", True)):
        raise QuasarError(f"sliding_window = {window} is in use; only full attention is supported")


def _head_size(values: dict) -> int:
    if values.get("head_dim") is None:
        return derived_head_size(values["hidden_size"], values["num_attention_heads"])
    return whole_number("head_dim", values["head_dim"])


def _rope(values: dict) -> tuple[float, dict | None]:
    """(base, scaling) from `rope_theta` and `rope_scaling`, or from `rope_parameters`, which holds both."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise QuasarError(f"rope parameters are {parameters!r}; they must be an object with a rope_type")
    base = positive_number("rope_theta", parameters.get("rope_theta", values.get("rope_theta", 10000.0)))
    factor = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if factor != 1.0:
        raise QuasarError(f"partial_rotary_factor = {factor} is not supported; allowed: 1.0")
    scaling = {key: value for key, value in parameters.items() if key not in _ROPE_KEYS}
    return base, None if rope_type(scaling) == "default" else scaling
