"""Ranks in one process: the forward pass of a tensor parallel checkpoint in plain torch, each rank after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quasar_trt.builders.sharded_writer import shard
from quasar_trt.checkpoint import LAYER_PREFIX
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins import reference as ops
from quasar_trt.recipe import Recipe
from quasar_trt.rope import rope_tables

# Two and three ranks divide heads and intermediate_size, and neither divides the vocabulary of 131.
SIZES = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8, "intermediate_size": 96}
RECIPES = {
    "bf16": Recipe("none"),
    "textbook": Recipe(smoothquant=0.5, lm_head="bf16"),
    "rotated": Recipe(),
    "16-bit": Recipe(rotate=False, activations=16),
    "mixed": Recipe(exclude=("transformer.layers.0.*", "*.attention.dense"), lm_head="int8"),
}


@torch.no_grad()
def forward(
    config: ModelConfig, recipe: Recipe, ranks: list[dict], blocks: dict[str, int], ids: list[int], rounded: bool = True
) -> Tensor:
    """Logits [len(ids), vocab] of ranks that compute in turn what each would compute at once.

    config: that of a rank. ranks: the tensors of each. blocks: as `hadamard_blocks`. rounded: False for activations that are
    not quantized before INT8 weights.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    cos, sin = (torch.from_numpy(table)[:, None] for table in rope_tables(config, len(ids)))

    def norm(x: Tensor, tensors: dict, name: str) -> Tensor:
        return ops.rms_norm(x, tensors[f"{name}.weight"], config.norm_epsilon)

    def linear(x: Tensor, tensors: dict, name: str) -> Tensor:
        """Without the bias."""
        weight = tensors[f"{name}.weight"]
        if weight.dtype != torch.int8:
            return x @ weight.float().T
        scales = tensors[f"{name}.per_channel_scale"][0]
        if f"{name}.smoother" in tensors:
            x = ops.smooth(x, 1.0 / tensors[f"{name}.smoother"][0], blocks.get(name.split(".", 3)[-1], 0))
        if not rounded:
            return x @ weight.float().T * scales
        bits = 16 if name == "lm_head" else recipe.activations
        return ops.LINEAR[bits](*ops.QUANTIZE[bits](x), weight, scales)

    def column(x: Tensor, tensors: dict, name: str) -> Tensor:
        return linear(x, tensors, name) + tensors.get(f"{name}.bias", torch.zeros(1)).float()

    def reduced(parts: list[Tensor], name: str) -> Tensor:
        """The sum over ranks; then the bias, which all of them hold, once."""
        total = sum(linear(part, tensors, name) for part, tensors in zip(parts, ranks, strict=True))
        return total + ranks[0].get(f"{name}.bias", torch.zeros(1)).float()

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attention(qkv: Tensor, tensors: dict, prefix: str) -> Tensor:
        q, k, v = qkv.view(len(ids), -1, config.head_size).split([heads, kv_heads, kv_heads], dim=1)
        if f"{prefix}attention.q_layernorm.weight" in tensors:
            q = norm(q, tensors, f"{prefix}attention.q_layernorm")
            k = norm(k, tensors, f"{prefix}attention.k_layernorm")
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (rotate(k), v))
        q, k, v = (x.transpose(0, 1) for x in (rotate(q), k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(len(ids), -1)

    x = ranks[0]["transformer.vocab_embedding.weight"][ids].float()
    for i in range(config.num_hidden_layers):
        prefix = LAYER_PREFIX.format(i=i)
        y = norm(x, ranks[0], f"{prefix}input_layernorm")
        mixed = [attention(column(y, tensors, f"{prefix}attention.qkv"), tensors, prefix) for tensors in ranks]
        x = x + reduced(mixed, f"{prefix}attention.dense")
        y = norm(x, ranks[0], f"{prefix}post_layernorm")
        gated = [
            ops.silu_mul(*(column(y, tensors, f"{prefix}mlp.{part}") for part in ("fc", "gate"))) for tensors in ranks
        ]
        x = x + reduced(gated, f"{prefix}mlp.proj")
    x = norm(x, ranks[0], "transformer.ln_f")
    parts = [linear(x, tensors, "lm_head") for tensors in ranks]
    logits = torch.cat(parts, dim=1)
    assert not logits[:, config.vocab_size :].any()
    return logits[:, : config.vocab_size]


def shards(config: ModelConfig, tensors: dict, tp_size: int) -> list[dict]:
    return [{name: shard(name, x, config, tp_size, rank) for name, x in tensors.items()} for rank in range(tp_size)]
