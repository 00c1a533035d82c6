"""Tiny seeded random models for tests: a transformers model, its checkpoint tensors, a quantized copy, an engine directory.

Everything here is written plainly and apart from the builder, so that it can stand as the other side of a comparison.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from quasar_trt.architectures import architecture_of, hadamard_blocks
from quasar_trt.checkpoint import LAYER_PREFIX, checkpoint_config, checkpoint_spec
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import TensorWriter

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TRANSFORMERS = int(transformers.__version__.split(".")[0])


def rope_fields(**parameters) -> dict:
    """RoPE parameters as fields of a configuration: one in transformers 5, two in transformers 4."""
    if TRANSFORMERS >= 5:
        return {"rope_parameters": parameters}
    return {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}


# Attention is 96 wide, hidden_size 48: nothing may take one for the other.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


class PanguEmbeddedForCausalLM(LlamaForCausalLM):
    """openPangu-Embedded, which transformers does not have: a Llama with biases on q, k, v and o."""


# architecture -> (class, fields of its configuration besides SIZES)
MODELS = {
    "LlamaForCausalLM": (LlamaForCausalLM, {}),
    "MistralForCausalLM": (MistralForCausalLM, {"sliding_window": None}),
    "Qwen2ForCausalLM": (Qwen2ForCausalLM, {}),
    "Qwen3ForCausalLM": (Qwen3ForCausalLM, {}),
    "PanguEmbeddedForCausalLM": (PanguEmbeddedForCausalLM, {"attention_bias": True}),
}


def tiny_llama(seed: int = 0, **overrides) -> PreTrainedModel:
    return tiny_model("LlamaForCausalLM", seed, **overrides)


@torch.no_grad()
def tiny_model(architecture: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A random float32 model in eval mode; `overrides` are fields of its configuration.

    Weights are BF16 values, so storing them in a checkpoint loses nothing, and are large enough that logits spread (their
    standard deviation is above 1) and that every layer, norm and bias matters to them.
    """
    model_class, fields = MODELS[architecture]
    values = copy.deepcopy(SIZES | fields | overrides)  # transformers writes into the rope parameters that it is given
    model = model_class(model_class.config_class(**values)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            weight.copy_(1.0 + 0.3 * noise)
        elif name.endswith("bias"):
            weight.copy_(0.3 * noise)
        elif "embed_tokens" in name:
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(noise * 1.5 / weight.shape[1] ** 0.5)
        weight.copy_(weight.bfloat16().float())
    return model


def model_config(model: PreTrainedModel) -> ModelConfig:
    config, layer = model.config, model.model.layers[0]
    scaling = getattr(config, "rope_scaling", None) or {}
    rope = getattr(config, "rope_parameters", None) or {**scaling, "rope_theta": config.rope_theta}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return ModelConfig(
        architecture=type(model).__name__,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        norm_epsilon=config.rms_norm_eps,
        rotary_base=rope["rope_theta"],
        rotary_scaling=scaling if scaling.get("rope_type", "default") != "default" else None,
        qkv_bias=layer.self_attn.q_proj.bias is not None,
        dense_bias=layer.self_attn.o_proj.bias is not None,
        mlp_bias=getattr(layer.mlp.gate_proj, "bias", None) is not None,
        tie_word_embeddings=config.tie_word_embeddings,
    )


def checkpoint_tensors(model: PreTrainedModel) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model's BF16 checkpoint tensors (recipe `Recipe("none")`), without loss."""
    config = model_config(model)
    state = {name: tensor.detach().bfloat16() for name, tensor in model.state_dict().items()}
    tensors = {"transformer.vocab_embedding.weight": state["model.embed_tokens.weight"]}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"transformer.layers.{i}.", f"model.layers.{i}."
        tensors[f"{ours}input_layernorm.weight"] = state[f"{theirs}input_layernorm.weight"]
        tensors[f"{ours}post_layernorm.weight"] = state[f"{theirs}post_attention_layernorm.weight"]
        for head in ("q", "k"):
            if f"{theirs}self_attn.{head}_norm.weight" in state:
                tensors[f"{ours}attention.{head}_layernorm.weight"] = state[f"{theirs}self_attn.{head}_norm.weight"]
        for name, parts in {
            "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "attention.dense": ["self_attn.o_proj"],
            "mlp.fc": ["mlp.gate_proj"],
            "mlp.gate": ["mlp.up_proj"],
            "mlp.proj": ["mlp.down_proj"],
        }.items():
            for kind in ("weight", "bias"):
                if f"{theirs}{parts[0]}.{kind}" in state:
                    tensors[f"{ours}{name}.{kind}"] = torch.cat([state[f"{theirs}{part}.{kind}"] for part in parts])
    tensors["transformer.ln_f.weight"] = state["model.norm.weight"]
    tensors["lm_head.weight"] = state["lm_head.weight"]
    return config, tensors


def quantized_tensors(
    config: ModelConfig, tensors: Mapping[str, Tensor], recipe: Recipe, calibration: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Smooths and quantizes BF16 checkpoint tensors after looking at the activations of the `calibration` ids.

    Of a rotated recipe only what engines do at run time: the residual stream keeps its basis. Rounding is to nearest.
    """
    largest: dict[str, Tensor] = {}
    inputs: dict[str, list[Tensor]] = {}

    def observe(name: str, x: Tensor) -> None:
        seen = x.abs().amax(dim=0)
        largest[name] = torch.maximum(largest[name], seen) if name in largest else seen
        inputs.setdefault(name, []).append(x)

    model = ReferenceModel(config, Recipe("none"), tensors, observe=observe)
    for ids in calibration:
        model(ids)
    found: dict[str, Tensor] = dict(tensors)
    architecture = architecture_of(config)
    blocks = hadamard_blocks(config, recipe)
    for i in range(config.num_hidden_layers):
        prefix = LAYER_PREFIX.format(i=i)
        for group in (*architecture.norms, *(linear.name for linear in architecture.linears if linear.norm is None)):
            members = [prefix + linear.name for linear in architecture.linears if group in (linear.norm, linear.name)]
            if not recipe.quantizes(members[0]):
                continue
            weights = {name: tensors[f"{name}.weight"].float() for name in members}
            columns = torch.cat(list(weights.values())).abs().amax(dim=0).clamp(min=1e-5)
            alpha = 0.5 if recipe.smoothquant is None else recipe.smoothquant
            smoother = (largest[members[0]].clamp(min=1e-5) ** alpha / columns ** (1 - alpha)).clamp(min=1e-5)
            if group in architecture.norms:
                norm = tensors[f"{prefix}{group}.weight"].float()
                folded = (norm / smoother).bfloat16()
                found[f"{prefix}{group}.weight"] = folded
                found[f"{prefix}{group}.scale_to_int"] = torch.ones(1)
                smoother = norm / folded.float()  # what the rounded norm really divides by
            else:
                found[f"{prefix}{group}.smoother"] = smoother[None]
            for name, weight in weights.items():
                smoothed = _transform_columns(weight * smoother, blocks.get(group, 1))
                found[f"{name}.weight"], found[f"{name}.per_channel_scale"] = _quantize_rows(smoothed)
                if recipe.static_activations:
                    read = _transform_columns(torch.cat(inputs[name]) / smoother, blocks.get(group, 1))
                    found[f"{name}.act_scale"] = (read.abs().max() / 127).reshape(1)
    if recipe.lm_head == "int8":
        found["lm_head.weight"], found["lm_head.per_channel_scale"] = _quantize_rows(tensors["lm_head.weight"].float())
    return {name: found[name] for name in checkpoint_spec(config, recipe)}


def _transform_columns(weight: Tensor, size: int) -> Tensor:
    """Each block of `size` columns times the orthonormal Hadamard matrix, whose signs are the parities of common bits."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.cat([block @ torch.tensor(signs) / size**0.5 for block in weight.split(size, dim=1)], dim=1)


def _quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return torch.round(weight / scale).clamp(-127, 127).to(torch.int8), scale.T.contiguous()


def tiny_checkpoint(
    seed: int = 0, recipe: Recipe | None = None, architecture: str = "LlamaForCausalLM", **overrides
) -> tuple[ModelConfig, Recipe, dict[str, Tensor]]:
    """(config, recipe, checkpoint tensors) of `tiny_model(architecture, seed, **overrides)`; the recipe defaults to
    `Recipe("none")`."""
    recipe = recipe or Recipe("none")
    config, tensors = checkpoint_tensors(tiny_model(architecture, seed, **overrides))
    if recipe.quantized:
        tensors = quantized_tensors(config, tensors, recipe, [random_ids(config, 64, seed=1000 + s) for s in range(4)])
    return config, recipe, tensors


def random_ids(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=generator).tolist()


def write_engine_dir(
    directory: Path, config: ModelConfig, recipe: Recipe, tensors: Mapping[str, Tensor], max_seq_len: int = 256
) -> Path:
    """An engine directory of the reference engine: manifest and checkpoint, no packed weights."""
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(checkpoint_config(config, recipe)))
    with TensorWriter(checkpoint / "rank0.safetensors", checkpoint_spec(config, recipe)) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    Manifest(
        producer={"tests": "0"},
        target="cpu",
        limits=Limits(max_batch_size=8, max_seq_len=max_seq_len, max_draft_len=8),
        tp_size=1,
        recipe=recipe,
        source={"path": "tiny", "kind": "random", "notices": []},
        calibration=None,
        files={"checkpoint/rank0.safetensors": writer.record},
    ).write(directory)
    return directory


def save_hf(model: PreTrainedModel, directory: Path, max_shard_size: str = "5GB") -> Path:
    """The model as a Hugging Face directory of BF16 safetensors, without a tokenizer."""
    copy.deepcopy(model).bfloat16().save_pretrained(directory, max_shard_size=max_shard_size)
    if isinstance(model, PanguEmbeddedForCausalLM):  # its configuration has other names
        path = Path(directory) / "config.json"
        values = json.loads(path.read_text())
        del values["mlp_bias"]
        values |= {"model_type": "PanguEmbedded", "bias": values.pop("attention_bias")}
        path.write_text(json.dumps(values))
    return Path(directory)
