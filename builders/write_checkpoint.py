"""Writes the checkpoint of an engine directory: smoothed and quantized, or BF16."""

from __future__ import annotations

from pathlib import Path

import torch

from quasar_trt.architectures import architecture_of
from quasar_trt.builders.progress import Advance
from quasar_trt.builders.quantize import quantize_rows
from quasar_trt.builders.smooth import Tensors, fold, layer_groups
from quasar_trt.builders.tokenizer_files import write_json
from quasar_trt.checkpoint import LAYER_PREFIX, Checkpoint, checkpoint_config, checkpoint_spec
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import FileRecord, TensorWriter


def write_checkpoint(
    config: ModelConfig, recipe: Recipe, tensors: Tensors, smoothers: Tensors, directory: Path, advance: Advance
) -> FileRecord:
    """Writes config.json and rank0.safetensors and reads their tables back. Calls `advance(1)` per tensor.

    tensors: BF16 or F32, from `convert`. smoothers: group name -> smoother; unused by an unquantized recipe.
    """
    spec = checkpoint_spec(config, recipe)
    directory.mkdir()
    write_json(directory / "config.json", checkpoint_config(config, recipe))
    ready: dict[str, torch.Tensor] = {}
    layers = iter(range(config.num_hidden_layers))
    with TensorWriter(directory / "rank0.safetensors", spec) as writer:
        for name in spec:
            if recipe.quantized and name.startswith("transformer.layers.") and name not in ready:
                ready = smoothed_layer(config, tensors, smoothers, next(layers))
            if recipe.quantize_lm_head and name == "lm_head.weight":
                ready = dict(
                    zip((name, "lm_head.per_channel_scale"), quantize_rows(tensors[name].float()), strict=True)
                )
            writer.write(name, ready[name] if name in ready else tensors[name].to(torch.bfloat16))
            advance(1)
    Checkpoint.open(directory)
    return writer.record


def smoothed_layer(config: ModelConfig, tensors: Tensors, smoothers: Tensors, layer: int) -> dict[str, torch.Tensor]:
    """Every checkpoint tensor of one layer, smoothed and quantized. smoothers: group name -> float32 [columns]."""
    prefix = LAYER_PREFIX.format(i=layer)
    found = {
        f"{prefix}{norm}.weight": tensors[f"{prefix}{norm}.weight"].to(torch.bfloat16)
        for norm in architecture_of(config).head_norms
    }
    for group in layer_groups(config, layer):
        factor = smoothers[group.name]
        if group.norm is None:
            found[f"{group.name}.smoother"] = factor[None]
        else:
            found[f"{group.norm}.weight"], factor = fold(tensors[f"{group.norm}.weight"], factor)
            found[f"{group.norm}.scale_to_int"] = torch.ones(1)
        for name in group.linears:
            codes, scale = quantize_rows(tensors[f"{name}.weight"].float() * factor)
            found[f"{name}.weight"], found[f"{name}.per_channel_scale"] = codes, scale
            if f"{name}.bias" in tensors:
                found[f"{name}.bias"] = tensors[f"{name}.bias"].to(torch.bfloat16)
    return found
