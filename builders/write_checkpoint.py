"""Writes the checkpoint of an engine directory: smoothed and quantized, or BF16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from quasar_trt.architectures import architecture_of
from quasar_trt.builders.progress import Advance
from quasar_trt.builders.quantize import quantize_rows
from quasar_trt.builders.smooth import fold, smoother
from quasar_trt.builders.tokenizer_files import write_json
from quasar_trt.checkpoint import LAYER_PREFIX, Checkpoint, checkpoint_config, checkpoint_spec
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import FileRecord, TensorWriter

Tensors = Mapping[str, torch.Tensor]


def write_checkpoint(
    config: ModelConfig, recipe: Recipe, tensors: Tensors, maxima: Tensors, directory: Path, advance: Advance
) -> FileRecord:
    """Writes config.json and rank0.safetensors and reads their tables back. Calls `advance(1)` per tensor.

    tensors: BF16 or F32, from `convert`. maxima: linear name -> largest |input| per channel; unused by an unquantized recipe.
    """
    spec = checkpoint_spec(config, recipe)
    directory.mkdir()
    write_json(directory / "config.json", checkpoint_config(config, recipe))
    ready: dict[str, torch.Tensor] = {}
    layers = iter(range(config.num_hidden_layers))
    with TensorWriter(directory / "rank0.safetensors", spec) as writer:
        for name in spec:
            if recipe.quantized and name.startswith("transformer.layers.") and name not in ready:
                ready = smoothed_layer(config, recipe, tensors, maxima, LAYER_PREFIX.format(i=next(layers)))
            if recipe.quantize_lm_head and name == "lm_head.weight":
                ready = dict(
                    zip((name, "lm_head.per_channel_scale"), quantize_rows(tensors[name].float()), strict=True)
                )
            writer.write(name, ready[name] if name in ready else tensors[name].to(torch.bfloat16))
            advance(1)
    Checkpoint.open(directory)
    return writer.record


def smoothed_layer(
    config: ModelConfig, recipe: Recipe, tensors: Tensors, maxima: Tensors, prefix: str
) -> dict[str, torch.Tensor]:
    """Every checkpoint tensor of the layer at `prefix`, smoothed and quantized."""
    architecture = architecture_of(config)
    layer: dict[str, torch.Tensor] = {}
    factors: dict[str, torch.Tensor] = {}  # linear -> factor of each weight column

    def weight(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"].float()

    def joint_smoother(names: list[str]) -> torch.Tensor:
        inputs = torch.stack([maxima[name] for name in names]).amax(dim=0)
        weights = torch.stack([weight(name).abs().amax(dim=0) for name in names]).amax(dim=0)
        return smoother(inputs, weights, recipe.smoothquant)

    for norm in architecture.norms:
        readers = [prefix + linear.name for linear in architecture.linears if linear.norm == norm]
        stored, factor = fold(weight(prefix + norm), joint_smoother(readers))
        layer[f"{prefix}{norm}.weight"] = stored
        layer[f"{prefix}{norm}.scale_to_int"] = torch.ones(1)
        factors.update(dict.fromkeys(readers, factor))
    for norm in architecture.head_norms:
        layer[f"{prefix}{norm}.weight"] = tensors[f"{prefix}{norm}.weight"].to(torch.bfloat16)
    for linear in architecture.linears:
        name = prefix + linear.name
        if linear.norm is None:
            factors[name] = joint_smoother([name])
            layer[f"{name}.smoother"] = factors[name][None]
        codes, scale = quantize_rows(weight(name) * factors[name])
        layer[f"{name}.weight"], layer[f"{name}.per_channel_scale"] = codes, scale
        if linear.bias(config):
            layer[f"{name}.bias"] = tensors[f"{name}.bias"].to(torch.bfloat16)
    return layer
