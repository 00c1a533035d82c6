"""Writes the checkpoint of an engine directory, one layer in memory at a time: rotated, smoothed and quantized, or BF16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quasar_trt.builders.convert import Converter
from quasar_trt.builders.layer_quantizer import LayerQuantizer
from quasar_trt.builders.progress import Advance
from quasar_trt.builders.quantize import quantize_vocabulary
from quasar_trt.builders.rotate import rotate_layer, rotate_vocabulary, rotation
from quasar_trt.builders.sharded_writer import ShardedWriter
from quasar_trt.builders.tokenizer_files import write_json
from quasar_trt.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_PREFIX,
    Checkpoint,
    checkpoint_config,
    checkpoint_spec,
)
from quasar_trt.engines.source_basis import FILE, SourceBasis
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import FileRecord


def write_checkpoint(
    source: Converter,
    recipe: Recipe,
    texts: Sequence[Sequence[int]],
    directory: Path,
    advance: Advance,
    tp_size: int = 1,
) -> tuple[dict[str, FileRecord], LayerQuantizer | None]:
    """Writes config.json and each rank's file, and reads their tables back. Calls `advance(1)` per layer.

    texts: calibration texts as ids; an unquantized recipe has no use for them. Returns the files' records by path below the
    engine directory, and the quantizer with what it chose, or None. Raises QuasarError as it and `Converter` do.
    """
    config = source.config
    directory.mkdir()
    q = rotation(config.hidden_size) if recipe.rotate else None
    embedding = source[EMBEDDING] if q is None else rotate_vocabulary(source[EMBEDDING], q)
    embedding = embedding.to(torch.bfloat16)
    quantizer = LayerQuantizer(config, recipe, embedding, texts, tp_size) if recipe.quantized else None
    spec = checkpoint_spec(config, recipe)
    with ShardedWriter(directory, config, recipe, tp_size) as writer:
        writer.write(EMBEDDING, embedding)
        del embedding  # before the first layer is read
        for i in range(config.num_hidden_layers):
            layer = source.layer(i)
            if q is not None:
                layer = rotate_layer(config, i, layer, q)
            if quantizer is not None:
                layer = quantizer(i, layer)
            prefix = LAYER_PREFIX.format(i=i)
            for name in (name for name in spec if name.startswith(prefix)):
                writer.write(name, layer[name] if quantizer is not None else layer[name].to(torch.bfloat16))
            del layer  # before the next one is read
            advance(1)
        norm, head = source[FINAL_NORM], source[HEAD]
        if q is not None:
            basis = SourceBasis(q.numpy(), norm.float().numpy())
            norm, head = torch.ones_like(norm), rotate_vocabulary(head, q, norm)
        writer.write(FINAL_NORM, norm.to(torch.bfloat16))
        if recipe.lm_head == "int8":
            codes, scale = quantize_vocabulary(head)
            writer.write(HEAD, codes)
            writer.write("lm_head.per_channel_scale", scale)
        else:
            writer.write(HEAD, head.to(torch.bfloat16))
    if quantizer is not None:
        recipe = quantizer.recipe
    write_json(directory / "config.json", checkpoint_config(config, recipe, tp_size))
    Checkpoint.open(directory)
    records = writer.records
    if q is not None and tp_size == 1:  # engines of several ranks give no hidden states
        records[FILE] = basis.write(directory.parent)
    return records, quantizer
