"""GGUF files of the llama architecture: blocks dequantized, llama.cpp's row order undone, names as in Hugging Face."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from quasar_trt.builders.gguf_tokenizer import build_tokenizer
from quasar_trt.builders.source import Source, check_source_tensors
from quasar_trt.builders.tokenizer_files import write_generation_config, write_tokenizer_config
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig, derived_head_size
from quasar_trt.rope import inverse_frequencies

# general.architecture -> Hugging Face class
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
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
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_FLOAT_TYPES = ("F32", "F16", "BF16")
# Llama 3.1 and 3.2: the file holds the resulting factor of each frequency, not the parameters; these are the published ones.
_LLAMA3_SCALINGS = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)


class GgufSource(Source):
    """One GGUF file, memory-mapped; each tensor is dequantized to float32 when asked for."""

    kind = "gguf"

    def __init__(self, path: Path):
        self.path = str(path)
        self._reader = _open_reader(path)
        self._refuse()
        self._tensors = {_hf_name(t.name): t for t in self._reader.tensors if t.name != _ROPE_FACTORS}
        try:
            self.config = self._model_config()
        except QuasarError as error:
            raise QuasarError(f"{self.path}: {error}") from None
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
        if ".self_attn.q_proj." in name:
            array = unpermute(array, self.config.num_attention_heads)
        elif ".self_attn.k_proj." in name:
            array = unpermute(array, self.config.num_key_value_heads)
        return torch.from_numpy(np.array(array))  # a copy: the mapped file is read-only

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

    def _llama(self, key: str, default=None):
        value = self._field(f"llama.{key}", default)
        if isinstance(value, list):
            raise QuasarError(f"llama.{key} = {value}, layer by layer; only one value for all is supported")
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
        name = self._field("general.architecture")
        if name not in _ARCHITECTURES:
            raise QuasarError(
                f"unknown architecture '{name}' in {self.path}; GGUF architectures supported: {', '.join(_ARCHITECTURES)}"
            )
        if self._field("split.count", 0) > 1:
            raise QuasarError(
                f"{self.path} is one of {self._field('split.count')} parts; merge them with llama-gguf-split"
            )
        if self._llama("expert_count", 0):
            raise QuasarError(
                f"{self.path} ({name}) has expert_count = {self._llama('expert_count')}: mixtures of experts are not supported; use a dense model"
            )

    def _model_config(self) -> ModelConfig:
        required = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count")
        missing = [f"llama.{key}" for key in required if self._llama(key) is None]
        if missing or "model.embed_tokens.weight" not in self._tensors:
            raise QuasarError(f"{', '.join(missing) or 'token_embd.weight'} is missing; it is not a whole model")
        hidden_size, intermediate_size, layers, heads = (self._llama(key) for key in required)
        kv_heads = self._llama("attention.head_count_kv", heads)
        head_size = self._llama("attention.key_length") or derived_head_size(hidden_size, heads)
        if self._llama("rope.dimension_count", head_size) != head_size:
            raise QuasarError(
                f"it rotates {self._llama('rope.dimension_count')} of {head_size} dimensions; only all are supported"
            )
        config = ModelConfig(
            architecture=_ARCHITECTURES["llama"],
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_size=head_size,
            vocab_size=int(self._tensors["model.embed_tokens.weight"].shape[1]),
            max_position_embeddings=self._llama("context_length", 2048),
            norm_epsilon=self._llama("attention.layer_norm_rms_epsilon", 1e-6),
            rotary_base=self._llama("rope.freq_base", 10000.0),
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            dense_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in self._tensors,
            tie_word_embeddings="lm_head.weight" not in self._tensors,
        )
        config = dataclasses.replace(config, rotary_scaling=self._rope_scaling(config))
        inverse_frequencies(config)  # parameters that make no sense are refused here, not in an engine
        return config

    def _rope_scaling(self, config: ModelConfig) -> dict | None:
        kind = self._llama("rope.scaling.type", "none")
        factors = next((t.data for t in self._reader.tensors if t.name == _ROPE_FACTORS), None)
        if kind == "linear" and factors is None:
            return {"rope_type": "linear", "factor": self._llama("rope.scaling.factor", 1.0)}
        if kind != "none":
            raise QuasarError(f"unknown rope type '{kind}'; one of: none, linear, llama3 ({_ROPE_FACTORS})")
        if factors is None:
            return None
        plain = inverse_frequencies(config)
        for scaling in _LLAMA3_SCALINGS:
            expected = plain / inverse_frequencies(dataclasses.replace(config, rotary_scaling=scaling))
            if expected.shape == factors.shape and np.allclose(expected, factors, rtol=1e-3):
                return scaling
        raise QuasarError(
            f"{_ROPE_FACTORS} holds no frequency factors of Llama 3.1 or 3.2; use the Hugging Face checkpoint"
        )


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k back to Hugging Face's order.

    llama.cpp rotates neighbouring rows, Hugging Face rows half a head apart: llama.cpp's row (head, i, half) is Hugging
    Face's row (head, half, i).
    """
    rows = array.shape[0] // heads
    return array.reshape(heads, rows // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def _hf_name(name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
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
