"""A Hugging Face config.json as a `ModelConfig`; whatever cannot be honoured is refused, nothing is dropped."""

from __future__ import annotations

from quasar_trt.architectures import ARCHITECTURES, MIXTURES
from quasar_trt.errors import QuasarError, unknown
from quasar_trt.model_config import ModelConfig, derived_head_size, positive_number, whole_number
from quasar_trt.rope import rope_tables, rope_type

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_ATTENTION_KINDS = ("full_attention", "sliding_attention")
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


def model_config(values: dict, where: str) -> ModelConfig:
    """Raises QuasarError naming the file `where`, the key and its value."""
    try:
        return _model_config(values)
    except QuasarError as error:
        raise QuasarError(f"{where}: {error}") from None


def _model_config(values: dict) -> ModelConfig:
    _refuse_experts(values)
    name = _architecture(values)
    architecture = ARCHITECTURES[name]
    values = architecture.defaults | values
    _refuse(values)
    missing = [key for key in _SIZES if key not in values]
    if missing:
        raise QuasarError(f"lacks {', '.join(missing)}")
    base, scaling = _rope(values)
    flags = {
        flag: given if isinstance(given, bool) else values.get(given) or False
        for flag, given in architecture.biases.items()
    }
    config = ModelConfig(
        architecture=name,
        **{key: values[key] for key in _SIZES},
        num_key_value_heads=_given(values, "num_key_value_heads", values["num_attention_heads"]),
        head_size=_head_size(values),
        max_position_embeddings=values["max_position_embeddings"],
        norm_epsilon=positive_number("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
        rotary_base=base,
        rotary_scaling=scaling,
        **flags,
        tie_word_embeddings=values.get("tie_word_embeddings") or False,
        sliding_window=_sliding_window(values),
    )
    rope_tables(config, 1)  # parameters that make no sense are refused here, not in an engine
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


def _refuse_experts(values: dict) -> None:
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "the model"
    found = [f"{key} = {values[key]}" for key in _EXPERT_KEYS if values.get(key)]
    if found or name in MIXTURES:
        counted = f" with {found[0]}" if found else ""
        raise QuasarError(f"{name}{counted}: mixtures of experts are not supported; use a dense model")


def _refuse(values: dict) -> None:
    """What changes the computation and is not supported."""
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise QuasarError(
            f"it has a quantization_config ({method or 'unknown method'}); build from the unquantized checkpoint instead"
        )
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise QuasarError(f"hidden_act '{activation}' is not supported; allowed: silu")


def _sliding_window(values: dict) -> int | None:
    """The window that some layer attends within, or None where every layer sees every position."""
    kinds = values.get("layer_types") or []
    foreign = kinds if not isinstance(kinds, list) else [kind for kind in kinds if kind not in _ATTENTION_KINDS]
    if foreign:
        raise QuasarError(f"layer_types has {foreign!r}; allowed: {', '.join(_ATTENTION_KINDS)}")
    if values.get("sliding_window") is None or not values.get("use_sliding_window", True):
        return None
    # Without a list of kinds, the layers from `max_window_layers` on have the window; all, where that is not given.
    first = whole_number("max_window_layers", values.get("max_window_layers", 0), least=0)
    layers = whole_number("num_hidden_layers", values["num_hidden_layers"])
    if "sliding_attention" not in kinds if kinds else first >= layers:
        return None
    window = whole_number("sliding_window", values["sliding_window"])
    positions = whole_number("max_position_embeddings", values["max_position_embeddings"])
    return window if window < positions else None


def _head_size(values: dict) -> int:
    if values.get("head_dim") is None:
        return derived_head_size(values["hidden_size"], values["num_attention_heads"])
    return whole_number("head_dim", values["head_dim"])


def _rope(values: dict) -> tuple[float, dict | None]:
    """(base, scaling) from `rope_theta` and `rope_scaling`, or from `rope_parameters`, which holds both."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise QuasarError(
            f"rope parameters are {parameters!r}; they must be one object with a rope_type for all layers"
        )
    base = positive_number("rope_theta", parameters.get("rope_theta", values.get("rope_theta", 10000.0)))
    factor = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if factor != 1.0:
        raise QuasarError(f"partial_rotary_factor = {factor} is not supported; allowed: 1.0")
    scaling = {key: value for key, value in parameters.items() if key not in _ROPE_KEYS}
    if rope_type(scaling) in ("llama3", "yarn") and values.get(_ORIGINAL) is not None:
        scaling[_ORIGINAL] = values[_ORIGINAL]  # beside the rope parameters it counts more than among them
    return base, None if rope_type(scaling) == "default" else scaling
