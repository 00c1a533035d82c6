#!/usr/bin/env python3
"""Writes a checkpoint of random weights in the shape of a published model, to measure builds and engines without its weights.

    scripts/random_checkpoint.py DIRECTORY --like qwen3-8b [--layers N] [--seed N]

The weights are one block of 8,388,593 (a prime) standard normal numbers over and over: each tensor reads the block from an
offset of its own, round and round, so that no two rows of a tensor are the same. That is fast, for no number is drawn per
weight, and the same seed gives the same bytes. Matrices have a standard deviation of 1 / sqrt(columns), those that write to
the residual stream 1 / sqrt(columns x 2 x layers), an embedding that is not the head too 1: hidden states and logits keep a
size near 1. One channel in 512 is an outlier, twelve times as large: in the norms (the same channels in all layers) and in
the rows of v and up, which feed o and down. Besides one tensor and the block, nothing is held in memory.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quasar_trt.builders.hf_config import model_config
from quasar_trt.builders.source import source_shapes
from quasar_trt.builders.tokenizer_files import write_generation_config, write_json, write_tokenizer_config
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig
from quasar_trt.tensorfile import TensorSpec, TensorWriter, total_bytes

SHARD_BYTES = 5_000_000_000
_BLOCK = 8_388_593
_OUTLIERS, _OUTLIER_GAIN = 512, 12.0
_END = "<end>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _shape(architecture: str, model_type: str, hidden, ffn, layers, heads, kv_heads, head_dim, vocab, **values) -> dict:
    """A config.json."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        "eos_token_id": 256,
    } | values


_QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960}
_LLAMA3 = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES = {
    "qwen3-8b": _shape(
        "Qwen3ForCausalLM", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, tie_word_embeddings=False, **_QWEN3
    ),
    "qwen3-0.6b": _shape(
        "Qwen3ForCausalLM", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, tie_word_embeddings=True, **_QWEN3
    ),
    "llama-3.1-8b": _shape(
        "LlamaForCausalLM",
        "llama",
        *(4096, 14336, 32, 32, 8, 128, 128256),
        tie_word_embeddings=False,
        rope_scaling=_LLAMA3_ROPE | {"factor": 8.0},
        **_LLAMA3,
    ),
    "llama-3.2-1b": _shape(
        "LlamaForCausalLM",
        "llama",
        *(2048, 8192, 16, 32, 8, 64, 128256),
        tie_word_embeddings=True,
        rope_scaling=_LLAMA3_ROPE | {"factor": 32.0},
        **_LLAMA3,
    ),
    "openpangu-embedded-7b": _shape(
        "PanguEmbeddedForCausalLM",
        "PanguEmbedded",
        *(4096, 12800, 34, 32, 8, 128, 153376),
        bias=True,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_theta=16e6,
        max_position_embeddings=32768,
    ),
    # No published model: for tests.
    "tiny": _shape("Qwen3ForCausalLM", "qwen3", 512, 768, 4, 8, 2, 64, 300, tie_word_embeddings=False, **_QWEN3),
}


class Weights:
    """Gives the tensors of a model, one at a time, in BF16."""

    def __init__(self, config: ModelConfig, seed: int):
        self._config = config
        self._generator = torch.Generator().manual_seed(seed)
        self._block = torch.randn(_BLOCK, generator=self._generator)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensors have to be asked for in their order: each draws its offset."""
        offset = int(torch.randint(_BLOCK, (), generator=self._generator))
        if len(shape) == 2:
            return self._matrix(name, *shape, offset)
        vector = 0.1 * self._normals(*shape, offset)
        if name.endswith("norm.weight"):
            vector += 1
            if len(vector) == self._config.hidden_size:
                vector[self._outliers(len(vector))] *= _OUTLIER_GAIN
        return vector.bfloat16()

    def _matrix(self, name: str, rows: int, columns: int, offset: int) -> torch.Tensor:
        untied_embedding = "embed_tokens" in name and not self._config.tie_word_embeddings
        deviation = 1.0 if untied_embedding else 1 / math.sqrt(columns)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation /= math.sqrt(2 * self._config.num_hidden_layers)
        matrix = torch.empty(rows, columns, dtype=torch.bfloat16)
        together = max(1, _BLOCK // columns)
        for start in range(0, rows, together):
            part = matrix[start : start + together]
            normals = self._normals(part.numel(), offset + start * columns)
            part.copy_(normals.mul_(deviation).reshape(part.shape))
        if name.endswith(("v_proj.weight", "up_proj.weight")):
            matrix[self._outliers(rows)] *= _OUTLIER_GAIN
        return matrix

    def _normals(self, count: int, offset: int) -> torch.Tensor:
        """float32 [count], at most one round of the block."""
        ahead = self._block[offset % _BLOCK :][:count]
        return torch.cat([ahead, self._block[: count - len(ahead)]])

    @staticmethod
    def _outliers(size: int) -> slice:
        return slice(_OUTLIERS // 4 % size, None, _OUTLIERS)


def write_checkpoint(directory: Path, values: dict, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes config.json (`values`), weights in shards of at most `shard_bytes`, generation_config.json and a tokenizer whose
    ids are bytes, then the end of text.

    Raises QuasarError for a directory that exists and for values that make no model.
    """
    if directory.exists():
        raise QuasarError(f"{directory} exists; choose another directory")
    config = model_config(values, "the shape")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        write_json(new / "config.json", values)
        write_generation_config(new, {}, (256,))
        _write_tokenizer(new)
        _write_shards(new, config, seed, shard_bytes)
        new.rename(directory)


def _write_shards(directory: Path, config: ModelConfig, seed: int, shard_bytes: int) -> None:
    specs = {name: TensorSpec("BF16", shape) for name, shape in source_shapes(config).items()}
    shards: list[dict[str, TensorSpec]] = [{}]
    for name, spec in specs.items():
        if shards[-1] and sum(other.nbytes for other in shards[-1].values()) + spec.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = spec
    weights = Weights(config, seed)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        with TensorWriter(directory / file, shard, {"format": "pt"}) as writer:
            for name, spec in shard.items():
                writer.write(name, weights.tensor(name, spec.shape))
        weight_map |= dict.fromkeys(shard, file)
        print(f"{file}: {len(shard)} tensors, {writer.record.size / 1e9:.2f} GB", flush=True)
    if len(shards) > 1:
        total = total_bytes(specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / "model.safetensors.index.json", index)


def _write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_tokenizer_config(directory, {"eos_token": _END, "chat_template": _CHAT_TEMPLATE})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes a checkpoint of random weights in the shape of a published model."
    )
    parser.add_argument("directory", type=Path, help="must not exist")
    parser.add_argument("--like", choices=SHAPES, required=True, help="whose shape")
    parser.add_argument("--layers", type=int, help="cut it to this many layers")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; 0 by default")
    options = parser.parse_args()
    values = SHAPES[options.like] | ({} if options.layers is None else {"num_hidden_layers": options.layers})
    try:
        write_checkpoint(options.directory, values, options.seed)
    except QuasarError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
