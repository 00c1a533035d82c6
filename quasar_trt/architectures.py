"""Supported architectures as data: which Hugging Face tensors make which checkpoint tensors, and who absorbs whose smoother.

The builder, the checkpoint, the packed file and the engines read sizes, norms, biases and smoothers from here. A dense
decoder whose layers compute the same is one more entry in `ARCHITECTURES` (docs/architectures.md); one that computes
something else also needs engines that do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quasar_trt.errors import unknown
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe

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
    hadamard: columns of each block that a rotated recipe transforms after the explicit smoother, at run time; a power of
        two that divides in_features.
    """

    name: str
    sources: dict[str, Size]
    in_features: Size
    norm: str | None
    bias: Callable[[ModelConfig], bool]
    hadamard: Size | None = None

    def out_features(self, config: ModelConfig) -> int:
        return sum(rows(config) for rows in self.sources.values())


def _power_of_two(size: int) -> int:
    """The largest power of two up to 512 that divides `size`."""
    return min(size & -size, 512)


_LINEARS = (
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
        hadamard=lambda c: _power_of_two(c.head_size),  # whole heads stay on one rank
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
        hadamard=lambda c: _power_of_two(c.intermediate_size),
    ),
)
_NORMS = {"input_layernorm": "input_layernorm.weight", "post_layernorm": "post_attention_layernorm.weight"}


@dataclass(frozen=True)
class Architecture:
    """What one family computes, under which names, and how its config.json is read.

    norms: checkpoint name -> Hugging Face name, both below the layer, of the norms over the hidden states.
    head_norms: the same of the norms over each head of q and of k before RoPE, or empty; nothing is folded into these.
    biases: flag of `ModelConfig` -> True, or the key of config.json that says so; flags that are not here are False.
    defaults: what the family means where its config.json is silent; an explicit null is not silence.
    stock: the architecture under which stock TensorRT-LLM modules compute the same, or None.
    stock_keys: what stock modules read from a checkpoint's config.json besides what all of them read.
    stock_dense_bias: whether stock modules with a bias on qkv have one on the attention output.
    """

    biases: dict[str, bool | str]
    defaults: dict[str, object]
    stock: str | None
    stock_keys: dict[str, object] = field(default_factory=dict)
    stock_dense_bias: bool = True
    head_norms: dict[str, str] = field(default_factory=dict)
    linears: tuple[Linear, ...] = _LINEARS
    norms: dict[str, str] = field(default_factory=lambda: dict(_NORMS))
    layer_prefix: str = "model.layers.{i}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


_ATTENTION_BIAS = {"qkv_bias": "attention_bias", "dense_bias": "attention_bias"}
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        biases=_ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
        defaults={"max_position_embeddings": 2048},
        stock="LlamaForCausalLM",
    ),
    "MistralForCausalLM": Architecture(
        biases={},
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        stock="MistralForCausalLM",
    ),
    "Qwen2ForCausalLM": Architecture(
        biases={"qkv_bias": True},
        defaults=_QWEN_DEFAULTS,
        stock="Qwen2ForCausalLM",
        stock_keys={"qwen_type": "qwen2"},
        stock_dense_bias=False,
    ),
    "Qwen3ForCausalLM": Architecture(
        biases=_ATTENTION_BIAS,
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        stock=None,  # stock modules leave out the norms over heads where linears are quantized
        head_norms={
            "attention.q_layernorm": "self_attn.q_norm.weight",
            "attention.k_layernorm": "self_attn.k_norm.weight",
        },
    ),
    "PanguEmbeddedForCausalLM": Architecture(
        biases={"qkv_bias": "bias", "dense_bias": "bias"},
        defaults={
            "bias": True,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 16000000.0,
        },
        stock="LlamaForCausalLM",
    ),
}

# Refused as what they are, also where config.json does not count the experts.
MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


def hadamard_blocks(config: ModelConfig, recipe: Recipe) -> dict[str, int]:
    """Name of a linear below its layer -> columns of its Hadamard blocks, for those that have any under this recipe."""
    if not recipe.rotate:
        return {}
    sizes = {linear.name: linear.hadamard(config) for linear in architecture_of(config).linears if linear.hadamard}
    return {name: size for name, size in sizes.items() if size > 1}


def architecture_of(config: ModelConfig) -> Architecture:
    """Raises QuasarError naming the supported architectures."""
    try:
        return ARCHITECTURES[config.architecture]
    except KeyError:
        raise unknown("architecture", config.architecture, ARCHITECTURES) from None
