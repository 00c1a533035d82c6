"""The shape of a decoder: what every engine, builder and drafter needs to know about a model, in TensorRT-LLM's words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one decoder-only model (names are those of a TensorRT-LLM checkpoint's config.json).

    Nothing here assumes hidden_size == num_attention_heads * head_size, a tied head or the absence of biases.
    """

    architecture: str  # Hugging Face class name, a key of `architectures.ARCHITECTURES`
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: dict | None = None  # as in Hugging Face: {"rope_type": ..., ...}; None is plain RoPE
    qkv_bias: bool = False
    dense_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def kv_size(self) -> int:
        """Rows of the k projection, and of the v projection."""
        return self.num_key_value_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        """Rows of the fused q, k, v projection."""
        return self.attention_size + 2 * self.kv_size

    @property
    def attention_size(self) -> int:
        """Columns of the attention output projection."""
        return self.num_attention_heads * self.head_size

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> ModelConfig:
        """Picks this class's fields out of `values`; keys of other readers are left alone."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in names})
