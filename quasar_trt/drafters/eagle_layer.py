"""The decoder layer of an EAGLE head, and what it remembers of texts: the interface, and the layer by the native decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quasar_trt.drafters.draft_linear import DraftLinears
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins import native
from quasar_trt.plugins.packing import interleave, pack_vector, pack_weight
from quasar_trt.rope import rope_tables
from quasar_trt.tensorfile import float32_of

if TYPE_CHECKING:
    from torch import Tensor

_MAX_ROWS = 256


@dataclass(frozen=True)
class LayerPart:
    """One text's rows of a pass, behind those in its cache.

    parents: where they are a tree, each one's parent among them, -1 for the last row in the cache; else each row sees all before.
    """

    text: int
    num_rows: int
    parents: Sequence[int] = ()


class EagleLayer(ABC):
    """Attention and MLP of the head's one decoder layer, for texts of up to `max_seq_len` rows and trees of up to `max_tree` behind them.

    max_rows: of a pass.
    """

    def __init__(self, max_tree: int):
        self.max_rows = max(_MAX_ROWS, max_tree)

    @abstractmethod
    def open(self) -> int:
        """A new text, of which nothing is known."""

    @abstractmethod
    def close(self, text: int) -> None:
        """Frees its cache."""

    @abstractmethod
    def truncate(self, text: int, length: int) -> None:
        """Forgets all rows but the first `length`."""

    @abstractmethod
    def __call__(self, parts: Sequence[LayerPart], x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """x [rows, inputs of q, k and v] and residual [rows, hidden_size] float32, part by part, at most max_rows -> [rows, hidden_size];
        the caches grow by their rows."""


@dataclass(frozen=True)
class LayerWeights:
    """Of a Llama layer without the norms before its attention, which are the head's own; float tensors [out, in]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    dense: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str) -> LayerWeights:
        """tensors: by the names of a Llama layer below `prefix`."""
        import torch

        names = [f"{prefix}self_attn.{each}_proj" for each in ("q", "k", "v")]
        weights = [tensors[f"{name}.weight"].float() for name in names]
        bias = None
        if any(f"{name}.bias" in tensors for name in names):
            zeros = [torch.zeros(len(weight)) for weight in weights]
            bias = torch.cat(
                [tensors.get(f"{name}.bias", zero).float() for name, zero in zip(names, zeros, strict=True)]
            )
        others = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
        return cls(torch.cat(weights), bias, *(tensors[f"{prefix}{name}.weight"].float() for name in others))


class NativeEagleLayer(EagleLayer):
    """By the native decoder, which gets rows instead of tokens; keys and values are BF16."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, max_seq_len: int, max_tree: int, linears: DraftLinears
    ):
        super().__init__(max_tree)
        prefix, tensors = "transformer.layers.0.", {}
        halves = [linears.stored(weight) for weight in (weights.gate, weights.up)]
        gate_up = [None if parts[0] is None else interleave(*parts) for parts in zip(*halves, strict=True)]
        for name, (weight, scale) in {
            "attention.qkv": linears.stored(weights.qkv),
            "attention.dense": linears.stored(weights.dense),
            "mlp.fc_gate": gate_up,
            "mlp.proj": linears.stored(weights.down),
        }.items():
            tensors[f"{prefix}{name}.weight"] = pack_weight(weight)
            if scale is not None:
                tensors[f"{prefix}{name}.scale"] = pack_vector(scale)
        if weights.qkv_bias is not None:
            tensors[f"{prefix}attention.qkv.bias"] = pack_vector(float32_of(weights.qkv_bias))
        tensors[f"{prefix}post_layernorm.weight"] = pack_vector(float32_of(weights.norm))
        tensors["rope.cos"], tensors["rope.sin"] = map(
            np.ascontiguousarray, rope_tables(config, max_seq_len + max_tree)
        )
        shape = {
            "layers": 1,
            "hidden": config.hidden_size,
            "intermediate": config.intermediate_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head": config.head_size,
            "vocab": 0,
            "norm_epsilon": config.norm_epsilon,
            "activations": 16,
            "hadamard_blocks": {},
            "rescored": 0,
            "max_rows": self.max_rows,
            "max_seq_len": max_seq_len + max_tree,
            "rank": 0,
            "ranks": 1,
            "vocab_share": 0,
            "attention_inputs": weights.qkv.shape[1],
        }
        self._decoder = native.decoder(shape, tensors, linears.pool, "", None)

    def open(self) -> int:
        return self._decoder.open()

    def close(self, text: int) -> None:
        self._decoder.close(text)

    def truncate(self, text: int, length: int) -> None:
        self._decoder.truncate(text, length)

    def __call__(self, parts: Sequence[LayerPart], x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        rows = [(part.text, part.num_rows, 0, list(part.parents)) for part in parts]
        return self._decoder.step_rows(rows, native.padded_rows(residual), native.padded_rows(x))
