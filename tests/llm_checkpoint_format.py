"""TensorRT-LLM's checkpoint format for SmoothQuant (W8A8, per token and per channel), described apart from our writer.

From what is known of release 1.2.1: names, types and shapes of every tensor of a rank, which part of which whole tensor it is, and
the keys of config.json. H hidden, Nq and Nkv heads, D head size, I intermediate, V vocabulary, T ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Model:
    """family: "llama", "mistral", "qwen2", "qwen3" or "pangu"; bias: whether a llama or qwen3 has biases in its attention."""

    family: str
    H: int
    Nq: int
    Nkv: int
    D: int
    I: int  # noqa: E741
    V: int
    layers: int
    bias: bool = False
    mlp_bias: bool = False

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2" or self.bias

    @property
    def dense_bias(self) -> bool:
        return self.bias and self.family != "qwen2"


@dataclass(frozen=True)
class Stored:
    """One tensor on one rank. split: "" for whole on every rank, "rows", "columns", "qkv" (rows of q, of k and of v, each split,
    then fused), or "padded rows"; of a [1, n] tensor, its n count as rows or columns of the weight that they belong to."""

    dtype: str
    shape: tuple[int, ...]
    split: str = ""


def _linear(
    name: str, rows: int, columns: int, split: str, quantized: bool, smoothed: bool, bias: bool, T: int
) -> dict:
    """split: of the weight. A linear split by columns keeps its scales and its bias whole."""
    by_rows = split in ("rows", "qkv")
    rows, columns = (rows // T, columns) if by_rows else (rows, columns // T)
    of_rows = split if by_rows else ""
    found = {f"{name}.weight": Stored("I8" if quantized else "BF16", (rows, columns), split)}
    if quantized:
        found[f"{name}.per_channel_scale"] = Stored("F32", (1, rows), of_rows)
        if smoothed:
            found[f"{name}.smoother"] = Stored("F32", (1, columns), "columns")
    if bias:
        found[f"{name}.bias"] = Stored("BF16", (rows,), of_rows)
    return found


def tensors(
    model: Model, T: int, quantized: bool, excluded: frozenset[str] = frozenset(), int8_head: bool = False
) -> dict:
    """name -> Stored of every tensor of a rank; excluded: linears (whole names) that are not quantized."""
    m = model
    found = {
        "transformer.vocab_embedding.weight": Stored("BF16", (m.V, m.H)),
        "transformer.ln_f.weight": Stored("BF16", (m.H,)),
        "lm_head.weight": Stored("I8" if int8_head else "BF16", (math.ceil(m.V / T), m.H), "padded rows"),
    }
    if int8_head:
        found["lm_head.per_channel_scale"] = Stored("F32", (1, math.ceil(m.V / T)), "padded rows")
    qkv_rows = (m.Nq + 2 * m.Nkv) * m.D
    for i in range(m.layers):
        prefix = f"transformer.layers.{i}."
        linears = {
            "attention.qkv": (qkv_rows, m.H, "qkv", False, m.qkv_bias, "input_layernorm"),
            "attention.dense": (m.H, m.Nq * m.D, "columns", True, m.dense_bias, None),
            "mlp.fc": (m.I, m.H, "rows", False, m.mlp_bias, "post_layernorm"),
            "mlp.gate": (m.I, m.H, "rows", False, m.mlp_bias, "post_layernorm"),
            "mlp.proj": (m.H, m.I, "columns", True, m.mlp_bias, None),
        }
        for norm in ("input_layernorm", "post_layernorm"):
            found[f"{prefix}{norm}.weight"] = Stored("BF16", (m.H,))
        for name, (rows, columns, split, smoothed, bias, norm) in linears.items():
            int8 = quantized and prefix + name not in excluded
            found |= _linear(prefix + name, rows, columns, split, int8, smoothed, bias, T)
            if int8 and norm:
                found[f"{prefix}{norm}.scale_to_int"] = Stored("F32", (1,))
        if m.family == "qwen3":
            for norm in ("q_layernorm", "k_layernorm"):
                found[f"{prefix}attention.{norm}.weight"] = Stored("BF16", (m.D,))
    return found


def part(whole: np.ndarray, stored: Stored, model: Model, T: int, rank: int) -> np.ndarray:
    """What rank holds of a whole tensor of the model."""
    if not stored.split:
        return whole
    axis = whole.ndim - 1 if whole.ndim == 1 or whole.shape[0] == 1 else (1 if stored.split == "columns" else 0)
    if stored.split == "qkv":
        q, k = model.Nq * model.D, model.Nkv * model.D
        pieces = np.split(whole, [q, q + k], axis=axis)
        return np.concatenate([np.split(piece, T, axis=axis)[rank] for piece in pieces], axis=axis)
    if stored.split == "padded rows":
        missing = stored.shape[axis] * T - whole.shape[axis]
        widths = [(0, missing if dim == axis else 0) for dim in range(whole.ndim)]
        whole = np.pad(whole, widths, constant_values=1 if whole.shape[0] == 1 else 0)
    return np.split(whole, T, axis=axis)[rank]


QUANTIZATION_KEYS = {
    *("quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "clamp_val", "use_meta_recipe"),
    *("has_zero_point", "pre_quant_scale", "exclude_modules"),
}  # another one is a TypeError in TensorRT-LLM


def config(model: Model, T: int, quantized: bool) -> dict:
    """Keys of config.json that TensorRT-LLM reads, all of the whole model."""
    m = model
    return {
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "hidden_size": m.H,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.Nq,
        "num_key_value_heads": m.Nkv,
        "head_size": m.D,
        "intermediate_size": m.I,
        "vocab_size": m.V,
        "hidden_act": "silu",
        "position_embedding_type": "rope_gpt_neox",
        "attn_bias": m.qkv_bias,
        "mlp_bias": m.mlp_bias,
        "qk_layernorm": m.family == "qwen3",
        "use_parallel_embedding": False,
        "mapping": {"world_size": T, "tp_size": T, "pp_size": 1},
    }


def stock(model: Model, quantized: bool, own_recipe: bool) -> str | None:
    """The architecture under which TensorRT-LLM's own modules run the checkpoint, if they do."""
    names = {
        "llama": "LlamaForCausalLM",
        "pangu": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    }
    if own_recipe or (quantized and model.Nq * model.D != model.H):
        return None
    return names.get(model.family)
