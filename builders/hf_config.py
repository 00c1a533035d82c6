"""A Hugging Face config.json as a `ModelConfig`; whatever cannot be honoured is refused, nothing is dropped."""

from __future__ import annotations

from quasar_trt.architectures import ARCHITECTURES
from quasar_trt.errors import QuasarError, unknown
from quasar_trt.model_config import ModelConfig
from quasar_trt.rope import inverse_frequencies

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


def model_config(values: dict, where: str) -> ModelConfig:
    """Raises QuasarError naming the file `where`, the key and its value."""
    architecture = _architecture(values, where)
    if values.get("quantization_config") is not None:
        method = dict(values["quantization_config"]).get("quant_method", "unknown method")
        raise QuasarError(
            f"{where} has a quantization_config ({method}); build from the unquantized checkpoint instead"
        )
    experts = [key for key in _EXPERT_KEYS if values.get(key)]
    if experts:
        raise QuasarError(
            f"{where} ({architecture}) has {experts[0]} = {values[experts[0]]}: mixtures of experts are not supported; use a dense model"
        )
    _refuse_sliding_window(values, where)
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise QuasarError(f"{where} has hidden_act '{activation}'; allowed: silu")
    missing = [key for key in _SIZES if key not in values]
    if missing:
        raise QuasarError(f"{where} lacks {', '.join(missing)}")
    sizes = {key: _size(values, key, where) for key in _SIZES}
    heads = sizes["num_attention_heads"]
    kv_heads = heads if values.get("num_key_value_heads") is None else _size(values, "num_key_value_heads", where)
    if heads % kv_heads:
        raise QuasarError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    base, scaling = _rope(values, where)
    attention_bias = bool(values.get("attention_bias", False))
    config = ModelConfig(
        architecture=architecture,
        **sizes,
        num_key_value_heads=kv_heads,
        head_size=_head_size(values, sizes["hidden_size"], heads, where),
        max_position_embeddings=_size({"max_position_embeddings": 2048} | values, "max_position_embeddings", where),
        norm_epsilon=float(values.get("rms_norm_eps", 1e-6)),
        rotary_base=base,
        rotary_scaling=scaling,
        qkv_bias=attention_bias,
        dense_bias=attention_bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
    )
    try:
        inverse_frequencies(config)  # an unknown type or a missing factor is refused here, not in an engine
    except QuasarError as error:
        raise QuasarError(f"{where}: {error}") from None
    return config


def _architecture(values: dict, where: str) -> str:
    names = values.get("architectures") or []
    if not names:
        raise QuasarError(f"{where} names no architecture; 'architectures' must be one of: {', '.join(ARCHITECTURES)}")
    if names[0] not in ARCHITECTURES:
        raise unknown(f"architecture in {where}", names[0], ARCHITECTURES)
    return names[0]


def _refuse_sliding_window(values: dict, where: str) -> None:
    """A window counts as in use unless the config says otherwise, by `use_sliding_window` or by `layer_types`."""
    window = values.get("sliding_window")
    kinds = values.get("layer_types") or []
    used = bool(kinds) and any(kind != "full_attention" for kind in kinds)
    if used or (window and not kinds and values.get("use_sliding_window", True)):
        raise QuasarError(f"{where} has sliding_window = {window} in use; only full attention is supported")


def _size(values: dict, key: str, where: str) -> int:
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise QuasarError(f"{where} has {key} = {value!r}; it must be a whole number of at least 1")
    return value


def _head_size(values: dict, hidden_size: int, heads: int, where: str) -> int:
    if values.get("head_dim") is not None:
        size = _size(values, "head_dim", where)
    elif hidden_size % heads:
        raise QuasarError(
            f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, and head_dim is not given"
        )
    else:
        size = hidden_size // heads
    if size % 2:
        raise QuasarError(f"{where}: head size {size} is odd; rotary embeddings need an even one")
    return size


def _rope(values: dict, where: str) -> tuple[float, dict | None]:
    """(base, scaling) from `rope_theta` and `rope_scaling`, or from `rope_parameters`, which holds both."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise QuasarError(f"{where} has rope parameters {parameters!r}; they must be an object with a rope_type")
    base = parameters.get("rope_theta", values.get("rope_theta", 10000.0))
    factor = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if not isinstance(base, int | float) or base <= 0:
        raise QuasarError(f"{where} has rope_theta = {base!r}; it must be a number above 0")
    if factor != 1.0:
        raise QuasarError(f"{where} has partial_rotary_factor = {factor}; only 1.0 is supported")
    scaling = {key: value for key, value in parameters.items() if key not in _ROPE_KEYS}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return float(base), None if kind == "default" else scaling
