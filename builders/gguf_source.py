"""GGUF files: blocks dequantized, llama.cpp's row order undone, names as in Hugging Face."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from quasar_trt.builders.gguf_tokenizer import build_tokenizer
from quasar_trt.builders.source import Source, check_source_tensors
from quasar_trt.builders.tokenizer_files import write_generation_config, write_tokenizer_config
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig, derived_head_size
from quasar_trt.rope import inverse_frequencies, rope_tables

# general.architecture -> (Hugging Face class, whether llama.cpp rotates neighbouring rows, for which those of q and k were
# moved). Files of Mistral say "llama" too.
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
    "pangu-embedded": ("PanguEmbeddedForCausalLM", False),
}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_FLOAT_TYPES = ("F32", "F16", "BF16")
# What all published models with frequency factors have in common; the file holds the resulting factor of each frequency only.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Keys under which a file asks for another computation -> the value that asks for none. llama.cpp and transformers disagree
# about yarn_attn_factor, so no value of it is taken.
_NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.0,
    "attention.temperature_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": None,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


class GgufSource(Source):
    """One GGUF file, memory-mapped; each tensor is dequantized to float32 when asked for."""

    kind = "gguf"

    def __init__(self, path: Path, check: Callable[[ModelConfig], object]):
        self.path = str(path)
        self._reader = _open_reader(path)
        self._name = self._field("general.architecture")
        self._refuse()
        self._tensors = {_hf_name(t.name): t for t in self._reader.tensors if t.name != _ROPE_FACTORS}
        try:
            self.config = self._model_config()
        except QuasarError as error:
            raise QuasarError(f"{self.path}: {error}") from None
        check(self.config)
        found = {name: ("F32", tuple(int(n) for n in t.shape[::-1])) for name, t in self._tensors.items()}
        unexpected = check_source_tensors(found, self.config, self.path, self._unreadable())
        self.names = tuple(found)
        self.notices = [f"unexpected tensors are not used: {', '.join(unexpected)}"] if unexpected else []
        types = Counter(t.tensor_type.name for t in self._tensors.values())
        blocks = [f"{count} {name}" for name, count in sorted(types.items()) if name not in _FLOAT_TYPES]
        if blocks:
            self.notices.append(f"dequantized tensors: {', '.join(blocks)}; the source model is what they hold")
        ends = [self._field(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
        self.eos_token_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        self._tokenizer, self._tokenizer_config = build_tokenizer(
            lambda key: self._field(f"tokenizer.{key}"), self.path
        )

    def tensor(self, name: str) -> torch.Tensor:
        from gguf import quants

        tensor = self._tensors[name]
        array = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        array = array.reshape(tuple(int(n) for n in tensor.shape[::-1]))
        _, moved = _ARCHITECTURES[self._name]
        if moved and ".self_attn.q_proj." in name:
            array = unpermute(array, self.config.num_attention_heads)
        elif moved and ".self_attn.k_proj." in name:
            array = unpermute(array, self.config.num_key_value_heads)
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))  # of the mapped file, read-only, a copy

    def write_tokenizer(self, directory: Path) -> None:
        self._tokenizer.save(str(directory / "tokenizer.json"))
        write_tokenizer_config(directory, self._tokenizer_config)
        ids = {
            key: self._field(f"tokenizer.ggml.{name}_token_id") for key, name in (("bos", "bos"), ("pad", "padding"))
        }
        values = {f"{key}_token_id": i for key, i in ids.items() if i is not None}
        write_generation_config(directory, values, self.eos_token_ids)

    def _field(self, key: str, default=None):
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def _value(self, key: str, default=None):
        """Metadata of the architecture; a list, one entry per layer, has to hold one value only."""
        value = self._field(f"{self._name}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise QuasarError(f"{self._name}.{key} = {value}, layer by layer; only one value for all is supported")
            return value[0]
        return value

    def _unreadable(self) -> list[str]:
        """A problem for each block type that cannot be dequantized, tried on one block of zeros."""
        from gguf import GGML_QUANT_SIZES, quants

        names: dict = {}
        for tensor in self._tensors.values():
            names.setdefault(tensor.tensor_type, []).append(tensor.name)
        problems = []
        for kind, having in names.items():
            try:
                quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                problems.append(f"{', '.join(having)}: type {kind.name} cannot be dequantized by the gguf package")
        return problems

    def _refuse(self) -> None:
        """What is refused before the configuration is read."""
        if self._name not in _ARCHITECTURES:
            raise QuasarError(
                f"unknown architecture '{self._name}' in {self.path}; GGUF architectures supported: {', '.join(_ARCHITECTURES)}"
            )
        if self._field("split.count", 0) > 1:
            raise QuasarError(
                f"{self.path} is one of {self._field('split.count')} parts; merge them with llama-gguf-split"
            )
        if self._field(f"{self._name}.expert_count", 0):
            raise QuasarError(
                f"{self.path} ({self._name}) has expert_count = {self._field(f'{self._name}.expert_count')}: mixtures of experts "
                "are not supported; use a dense model"
            )

    def _model_config(self) -> ModelConfig:
        required = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count")
        missing = [f"{self._name}.{key}" for key in required if self._value(key) is None]
        if missing or "model.embed_tokens.weight" not in self._tensors:
            raise QuasarError(f"{', '.join(missing) or 'token_embd.weight'} is missing; it is not a whole model")
        for key, neutral in _NEUTRAL.items():
            if self._value(key, neutral) != neutral:
                raise QuasarError(f"{self._name}.{key} = {self._value(key)} is not supported; use a model without it")
        hidden_size, intermediate_size, layers, heads = (self._value(key) for key in required)
        head_size = self._value("attention.key_length") or derived_head_size(hidden_size, heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._value(key, head_size) != head_size:
                raise QuasarError(
                    f"{self._name}.{key} = {self._value(key)} is not supported; allowed: {head_size}, the size of its q and k heads"
                )
        architecture, _ = _ARCHITECTURES[self._name]
        positions = self._value("context_length", 2048)
        window = self._value("attention.sliding_window", 0)
        config = ModelConfig(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=self._value("attention.head_count_kv", heads),
            head_size=head_size,
            vocab_size=int(self._tensors["model.embed_tokens.weight"].shape[1]),
            max_position_embeddings=positions,
            norm_epsilon=self._value("attention.layer_norm_rms_epsilon", 1e-6),
            rotary_base=self._value("rope.freq_base", 10000.0),
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            dense_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in self._tensors,
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            sliding_window=window if 0 < window < positions else None,
        )
        config = dataclasses.replace(config, rotary_scaling=self._rope_scaling(config))
        rope_tables(config, 1)  # parameters that make no sense are refused here, not in an engine
        return config

    def _rope_scaling(self, config: ModelConfig) -> dict | None:
        # A factor without a type is linear, as in files older than the type; so is the older key.
        kind = self._value("rope.scaling.type", "linear")
        factor = self._value("rope.scaling.factor", self._value("rope.scale_linear", 1.0))
        factors = next((t.data for t in self._reader.tensors if t.name == _ROPE_FACTORS), None)
        if kind not in ("none", "linear", "yarn"):
            raise QuasarError(f"unknown rope type '{kind}'; one of: none, linear, yarn, llama3 ({_ROPE_FACTORS})")
        scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
        if factors is not None:
            if scaled:
                raise QuasarError(f"it has both rope type '{kind}' and {_ROPE_FACTORS}; only one of them is supported")
            return _llama3_scaling(config, factors)
        if not scaled:
            return None
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            keys = {
                "original_max_position_embeddings": "original_context_length",
                "beta_fast": "yarn_beta_fast",
                "beta_slow": "yarn_beta_slow",
            }
            found = {ours: self._value(f"rope.scaling.{theirs}") for ours, theirs in keys.items()}
            scaling |= {key: value for key, value in found.items() if value is not None}
        return scaling


def _llama3_scaling(config: ModelConfig, factors: np.ndarray) -> dict | None:
    """The parameters that give `factors`, by which each frequency is divided."""
    if (factors == 1).all():
        return None
    scaling = {**_LLAMA3, "factor": float(factors.max())}
    plain, scaled = (inverse_frequencies(dataclasses.replace(config, rotary_scaling=s)) for s in (None, scaling))
    if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-3):
        raise QuasarError(
            f"{_ROPE_FACTORS} holds no frequency factors of rope type 'llama3'; use the Hugging Face checkpoint"
        )
    return scaling


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k back to Hugging Face's order.

    llama.cpp rotates neighbouring rows, Hugging Face rows half a head apart: llama.cpp's row (head, i, half) is Hugging
    Face's row (head, half, i).
    """
    rows = array.shape[0] // heads
    return array.reshape(heads, rows // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def _hf_name(name: str) -> str:
    """The Hugging Face name; a tensor of a layer that has none keeps its own below the layer, where it is refused."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)(\..+)", name)
    if match:
        return f"model.layers.{match[1]}.{_LAYER_NAMES.get(match[2], match[2])}{match[3]}"
    return _GLOBAL_NAMES.get(name, name)


def _open_reader(path: Path):
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise QuasarError(f"{path} is not a GGUF file; give a Hugging Face directory, a GGUF file or a hub id")
    try:
        from gguf import GGUFReader
    except ImportError:
        raise QuasarError(f"reading {path} needs the gguf package: pip install 'quasar-trt[gguf]'") from None
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise QuasarError(f"{path} is truncated or damaged ({error}); download it again") from None
