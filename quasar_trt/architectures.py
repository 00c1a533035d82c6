"""Supported architectures as data: which Hugging Face tensors make which checkpoint tensors, and who absorbs whose smoother.

The builder, the checkpoint and the packed file read sizes, biases and smoothers from here. A decoder whose layers compute
the same under other names is one more entry in `ARCHITECTURES`; one that computes something else also needs engines
that do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quasar_trt.errors import unknown
from quasar_trt.model_config import ModelConfig

Size = Callable[[ModelConfig], int]


@dataclass(frozen=True)
class Linear:
    """A quantized linear of one layer; weight [out_features, in_features].

    name: checkpoint name below `transformer.layers.{i}.`.
    sources: Hugging Face module name below the layer (without `.weight` or `.bias`) -> its rows in a configuration; their
        tensors are concatenated along the output dimension in this order.
    norm: the norm that absorbs the smoother (shared by all linears that name it), or None for an explicit smoother
        that divides the input at run time.
    bias: whether this configuration has a bias here.
    """

    name: str
    sources: dict[str, Size]
    in_features: Size
    norm: str | None
    bias: Callable[[ModelConfig], bool]

    def out_features(self, config: ModelConfig) -> int:
        return sum(rows(config) for rows in self.sources.values())


@dataclass(frozen=True)
class Architecture:
    """Names of one family. `norms` maps checkpoint names to Hugging Face names, both below the layer."""

    linears: tuple[Linear, ...]
    norms: dict[str, str]
    layer_prefix: str = "model.layers.{i}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


_LLAMA = Architecture(
    linears=(
        Linear(
            "attention.qkv",
            {
                "self_attn.q_proj": lambda c: c.attention_size,
                "self_attn.k_proj": lambda c: c.kv_size,
                "self_attn.v_proj": lambda c: c.kv_size,
            },
            lambda c: c.hidden_size,
            "input_layernorm",
            lambda c: c.qkv_bias,
        ),
        Linear(
            "attention.dense",
            {"self_attn.o_proj": lambda c: c.hidden_size},
            lambda c: c.attention_size,
            None,
            lambda c: c.dense_bias,
        ),
        # TensorRT-LLM calls the gate projection `fc` and the up projection `gate`.
        Linear(
            "mlp.fc",
            {"mlp.gate_proj": lambda c: c.intermediate_size},
            lambda c: c.hidden_size,
            "post_layernorm",
            lambda c: c.mlp_bias,
        ),
        Linear(
            "mlp.gate",
            {"mlp.up_proj": lambda c: c.intermediate_size},
            lambda c: c.hidden_size,
            "post_layernorm",
            lambda c: c.mlp_bias,
        ),
        Linear(
            "mlp.proj",
            {"mlp.down_proj": lambda c: c.hidden_size},
            lambda c: c.intermediate_size,
            None,
            lambda c: c.mlp_bias,
        ),
    ),
    norms={"input_layernorm": "input_layernorm.weight", "post_layernorm": "post_attention_layernorm.weight"},
)

ARCHITECTURES: dict[str, Architecture] = {"LlamaForCausalLM": _LLAMA}


def architecture_of(config: ModelConfig) -> Architecture:
    """Raises QuasarError naming the supported architectures."""
    try:
        return ARCHITECTURES[config.architecture]
    except KeyError:
        raise unknown("architecture", config.architecture, ARCHITECTURES) from None
