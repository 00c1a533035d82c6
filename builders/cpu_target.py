"""Compiles a checkpoint for the CPU: packs its tensors into `rank{r}.engine` (see `quasar_trt.engines.cpu_layout`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.builders.quantize import with_int8_head
from quasar_trt.checkpoint import EMBEDDING
from quasar_trt.engines.cpu_layout import HEAD_ROWS, LAYOUT_VERSION, packed_spec
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins.packing import interleave, pack_vector, pack_weight
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import FileRecord, TensorWriter, float32_of, to_numpy


def _packed(name: str, tensors: Mapping) -> np.ndarray:
    """The tensor `name` of `packed_spec` from tensors in checkpoint names."""
    if name in (HEAD_ROWS, EMBEDDING):
        return to_numpy(tensors[name])
    stem, _, kind = name.rpartition(".")
    if kind == "inverse_smoother":
        return pack_vector(1.0 / float32_of(tensors[f"{stem}.smoother"]))
    # gate and up projection become one linear of alternating blocks
    sources = [stem]
    if stem.endswith("mlp.fc_gate"):
        sources = [stem.removesuffix("fc_gate") + part for part in ("fc", "gate")]
    kind = "per_channel_scale" if kind == "scale" else kind
    if kind == "weight" and tensors[f"{sources[0]}.weight"].ndim == 2:
        parts = [to_numpy(tensors[f"{source}.weight"]) for source in sources]
        return pack_weight(interleave(*parts) if len(parts) == 2 else parts[0])
    parts = [float32_of(tensors[f"{source}.{kind}"]).reshape(-1) for source in sources]
    return pack_vector(interleave(*parts) if len(parts) == 2 else parts[0])


def compile_cpu(
    config: ModelConfig,
    recipe: Recipe,
    tensors: Mapping,
    path: Path,
    advance: Callable[[int], None] = lambda count: None,
    rank: int = 0,
) -> FileRecord:
    """Writes `path` from `tensors` (torch or numpy, in checkpoint names); calls `advance(bytes)` after each tensor.

    For one of several ranks: `config` is its `rank_config`, `tensors` its checkpoint.
    """
    tensors = with_int8_head(tensors, recipe)
    spec = packed_spec(config, recipe)
    metadata = {
        "layout_version": LAYOUT_VERSION,
        "model": json.dumps(config.to_dict()),
        "recipe": json.dumps(recipe.to_dict()),
        "rank": str(rank),
        "hadamard_blocks": json.dumps(hadamard_blocks(config, recipe)),
    }
    with TensorWriter(path, spec, metadata) as writer:
        for name in spec:
            writer.write(name, _packed(name, tensors))
            advance(spec[name].nbytes)
    return writer.record
