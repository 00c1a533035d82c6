"""Tiny GGUF files: a tiny model as llama.cpp stores it, with a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

# architecture -> (general.architecture, whether llama.cpp moves rows of q and k)
ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", True),
    "MistralForCausalLM": ("llama", True),
    "Qwen2ForCausalLM": ("qwen2", False),
    "Qwen3ForCausalLM": ("qwen3", False),
    "PanguEmbeddedForCausalLM": ("pangu-embedded", False),
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows (head, half, i) of Hugging Face as llama.cpp's (head, i, half), written row by row."""
    size = len(weight) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def byte_vocabulary(extra: list[str]) -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *extra]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    pre: str = "gpt-2",
    block_type: str | None = None,
    architecture: str | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    **extra,
) -> Path:
    """`extra` are further metadata values. block_type: quantization of the matrices, e.g. "Q8_0"; float32 without.

    architecture: general.architecture, that of the model without. tokenizer: writes another one than the byte-level one.
    """
    config = model.config
    name, moved = ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, architecture or name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if tokenizer:
        tokenizer(writer)
    else:
        _add_byte_level(writer, pre, config.vocab_size)
    for key, value in extra.items():
        if hasattr(writer, f"add_{key}"):
            getattr(writer, f"add_{key}")(value)
        else:  # a key without a method of its own
            writer.add_float32(f"{architecture or name}.{key}", value)
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if moved and f".{part}." in tensor_name:
                array = llama_cpp_order(array, heads)
        if block_type and array.ndim == 2:
            kind = gguf.GGMLQuantizationType[block_type]
            writer.add_tensor(_gguf_name(tensor_name), gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(tensor_name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_byte_level(writer: gguf.GGUFWriter, pre: str, vocab_size: int) -> None:
    tokens = byte_vocabulary(["12", "<end>"])
    tokens += [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(tokens.index("<end>"))
    writer.add_bos_token_id(tokens.index("<end>"))


def _gguf_name(name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[stem]}.{kind}"


def dequantized(array: np.ndarray, block_type: str) -> torch.Tensor:
    """What a matrix is after a round trip through `block_type`."""
    kind = gguf.GGMLQuantizationType[block_type]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))
