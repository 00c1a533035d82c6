"""EAGLE's heads: one decoder layer that goes on from the verifier's hidden states, in the formats of SafeAILab's EAGLE.

EAGLE and EAGLE-2 (Li et al., arXiv 2401.15077 and 2406.16858, whose heads are the same) guess the next state behind the final norm from the
last one and the embedding of the token that follows it; the model's own head turns it into logits. EAGLE-3 (arXiv 2503.01840) reads three
states from between the layers, and has a head of its own over a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quasar_trt.drafters.draft_linear import DraftLinear, DraftLinears, rms_norm
from quasar_trt.drafters.eagle_layer import LayerPart, LayerWeights, NativeEagleLayer
from quasar_trt.drafters.eagle_layer_plain import PlainEagleLayer
from quasar_trt.drafters.head_files import EAGLE3_LAYERS, check_shapes, eagle3_places, read_config, read_weights
from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig, whole_number
from quasar_trt.tensorfile import float32_of, to_numpy

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = "embed_tokens.weight"


class EagleHead:
    """The head in `directory` for an engine's model.

    max_tree: rows behind a text. hidden_layers: the states that it reads, as `Engine.keep_hidden_states` has them. layer: its
    decoder layer, where texts are opened and closed.
    Raises QuasarError for another model's head, and for files that are no head.
    """

    def __init__(self, directory: Path, engine: Engine, max_tree: int, linears: DraftLinears):
        import torch

        values = read_config(directory)
        where = directory / "config.json"
        self.config = config = _head_config(values, where)
        self._engine = engine
        tensors, path = read_weights(directory)
        self._third = any(name.startswith("midlayer.") for name in tensors)
        model, prefix = engine.config, "midlayer." if self._third else "layers.0."
        if config.vocab_size != model.vocab_size:
            raise QuasarError(
                f"{where} has vocab_size {config.vocab_size}, the engine's model {model.vocab_size}; take the head of this model"
            )
        layers = model.num_hidden_layers
        self.hidden_layers = eagle3_places(layers) if self._third else (layers,)
        if not self.hidden_layers:
            raise QuasarError(
                f"{path} is an EAGLE-3 head, the model has {layers} layers; allowed: {EAGLE3_LAYERS} or more"
            )
        expected, optional = _layer_shapes(config, prefix, 2 if self._third else 1)
        if self._third:
            _expect_third(expected, optional, values, config, model, where)
        else:
            expected["fc.weight"] = (config.hidden_size, 2 * model.hidden_size)
            optional["fc.bias"] = (config.hidden_size,)
        if config.hidden_size == model.hidden_size:
            optional[_EMBEDDING] = (config.vocab_size, config.hidden_size)
        elif self._third:
            expected[_EMBEDDING] = (config.vocab_size, config.hidden_size)
        else:
            raise QuasarError(
                f"{where} has hidden_size {config.hidden_size}, the engine's model {model.hidden_size}; take the head of this model"
            )
        check_shapes(tensors, expected, optional, path)
        self._embedding = tensors.get(_EMBEDDING)
        # What reads states or embeddings of the engine reads them in its basis.
        basis = engine.source_basis.to_source()
        embedding_basis = basis if self._embedding is None else None
        weights = LayerWeights.of(tensors, prefix)
        fc, size = tensors["fc.weight"].float(), config.hidden_size
        if self._third:
            fc = torch.cat([_folded(part, basis) for part in fc.chunk(3, dim=1)], dim=1)
            norms = [
                tensors[f"{name}.weight"].float()
                for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
            ]
            # RMSNorm comes before a rotation or behind it, its weight does not.
            own, rest = weights.qkv[:, :size] * norms[0], weights.qkv[:, size:]
            weights = replace(weights, qkv=torch.cat([_folded(own, embedding_basis), rest], dim=1))
            self._norms = [float32_of(norm) for norm in norms[1:]]
            self._head = linears(tensors["lm_head.weight"])
            self._ids = _draft_ids(tensors, config.vocab_size, path)
        else:
            fc = torch.cat([_folded(fc[:, :size], embedding_basis), fc[:, size:]], dim=1)
            turn, back = engine.source_basis.to_source(behind_norm=True), engine.source_basis.for_head()
            self._to_source = self._for_head = None
            if turn is not None:
                self._to_source = linears(torch.tensor(turn))
                # Always BF16: a small weight of the norm makes a large column, which would take the range of every row.
                self._for_head = DraftLinear(to_numpy(torch.tensor(back).bfloat16()), None, None, linears.pool)
        self._fc = linears(fc, tensors.get("fc.bias"))
        layer = NativeEagleLayer if linears.pool else PlainEagleLayer
        self.layer = layer(config, weights, engine.max_seq_len, max_tree, linears)

    def features(self, states: np.ndarray) -> np.ndarray:
        """What goes on from the engine's states [rows, places of hidden_layers, hidden_size]: [rows, hidden_size of the head]."""
        if self._third:
            return self._fc(states.reshape(len(states), -1))
        return self._to_source(states[:, 0]) if self._to_source else states[:, 0]

    def __call__(self, tokens: Sequence[int], features: np.ndarray, parts: Sequence[LayerPart]) -> np.ndarray:
        """The features after those of the rows: `features` [rows, hidden_size] lie before `tokens`, part by part."""
        embedded = self._embed(tokens)
        if not self._third:
            x = self._fc(np.concatenate([embedded, features], axis=1))
            return self.layer(parts, x, x)
        epsilon = self.config.norm_epsilon
        normed = rms_norm(embedded, 1.0, epsilon), rms_norm(features, self._norms[0], epsilon)
        return self.layer(parts, np.concatenate(normed, axis=1), features)

    def logits(self, features: np.ndarray) -> np.ndarray:
        """[rows, hidden_size] -> [rows, ids that it can draft] float32."""
        if self._third:
            return self._head(rms_norm(features, self._norms[1], self.config.norm_epsilon))
        return self._engine.head_logits(self._for_head(features) if self._for_head else features)

    def token_ids(self, ids: np.ndarray) -> np.ndarray:
        """The model's ids of those that `logits` counts."""
        return self._ids[ids] if self._third else ids

    def _embed(self, tokens: Sequence[int]) -> np.ndarray:
        if self._embedding is None:
            return self._engine.embeddings(tokens)
        return float32_of(self._embedding[list(tokens)])


def _folded(weight: Tensor, basis: np.ndarray | None) -> Tensor:
    """A weight [out, hidden_size] for the engine's basis, see `SourceBasis.to_source`."""
    import torch

    return weight if basis is None else weight @ torch.tensor(basis)


def _head_config(values: dict, where: Path) -> ModelConfig:
    from quasar_trt.builders.hf_config import model_config

    config = model_config(values | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, str(where))
    layers = values.get("num_hidden_layers", 1)
    if layers != 1:
        raise QuasarError(f"{where} has num_hidden_layers {layers!r}; allowed: 1, a head has one layer")
    return config


def _layer_shapes(config: ModelConfig, prefix: str, inputs: int) -> tuple[dict, dict]:
    """(expected, optional) shapes of a Llama layer without norms before the attention, which reads `inputs` times hidden_size."""
    hidden, middle = config.hidden_size, config.intermediate_size
    rows = {"q": config.attention_size, "k": config.kv_size, "v": config.kv_size}
    expected = {f"{prefix}self_attn.{name}_proj.weight": (size, inputs * hidden) for name, size in rows.items()}
    expected |= {
        f"{prefix}self_attn.o_proj.weight": (hidden, config.attention_size),
        f"{prefix}mlp.gate_proj.weight": (middle, hidden),
        f"{prefix}mlp.up_proj.weight": (middle, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, middle),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    optional = {f"{prefix}self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    # Follows from the configuration; older files have it.
    optional[f"{prefix}self_attn.rotary_emb.inv_freq"] = (config.head_size // 2,)
    return expected, optional


def _expect_third(
    expected: dict, optional: dict, values: dict, config: ModelConfig, model: ModelConfig, where: Path
) -> None:
    """Adds what EAGLE-3 has besides its layer."""
    hidden = config.hidden_size
    try:
        size = whole_number("draft_vocab_size", values.get("draft_vocab_size", config.vocab_size))
    except QuasarError as error:
        raise QuasarError(f"{where}: {error}") from None
    expected |= {f"{name}.weight": (hidden,) for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")}
    expected["fc.weight"] = (hidden, 3 * model.hidden_size)
    expected["lm_head.weight"] = (size, hidden)
    # Without a map the ids are the model's own.
    maps = optional if size == config.vocab_size else expected
    maps["d2t"] = (size,)
    optional["t2d"] = (config.vocab_size,)  # which ids are drafted; the other map says it too


def _draft_ids(tensors: dict[str, Tensor], vocab_size: int, path: Path) -> np.ndarray:
    """The model's ids of the draft vocabulary: the map holds their differences."""
    ids = np.arange(len(tensors["lm_head.weight"]))
    if "d2t" in tensors:
        ids = ids + tensors["d2t"].numpy().astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise QuasarError(f"{path}: d2t leads to ids from {ids.min()} to {ids.max()}; allowed: 0 to {vocab_size - 1}")
    return ids
