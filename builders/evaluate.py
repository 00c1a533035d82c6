"""Fidelity on request: of an engine directory that was built before, against its source or another model of the same shape."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from quasar_trt.architectures import architecture_of
from quasar_trt.builders.fidelity import measure
from quasar_trt.builders.fidelity_text import fidelity_windows
from quasar_trt.builders.progress import Stages
from quasar_trt.builders.source import Source, open_source
from quasar_trt.checkpoint import Checkpoint
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.model_config import ModelConfig
from quasar_trt.rope import rope_tables
from quasar_trt.tokenizer import load_tokenizer

_COMPARED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_size",
    "vocab_size",
    "qkv_bias",
    "dense_bias",
    "mlp_bias",
)
_POSITIONS = 512  # whose rotary embeddings are compared


def evaluate_fidelity(
    engine_dir: Path,
    *,
    against: str | None = None,
    text: Path | None = None,
    tokens: int | None = None,
    window: int | None = None,
    threads: int | None = None,
    progress: bool = True,
) -> dict:
    """Measures the engine in `engine_dir`, which stays as it is.

    against: as `build` takes models; the source that the manifest names when None. text, tokens, window: as of
    `fidelity_windows`. threads: of the engine and of torch, which computes the source; all usable CPUs when None.

    Returns `engine` and `source` (the two paths) and what `measure` returns. Raises QuasarError as `measure` and
    `fidelity_windows` do, and for a model that is not there or has another configuration than the engine's.
    """
    manifest = Manifest.open(engine_dir)
    config = Checkpoint.open(engine_dir / "checkpoint").config
    tokenizer = load_tokenizer(engine_dir) if (engine_dir / "tokenizer.json").is_file() else None
    windows, described = fidelity_windows(
        tokenizer, config.vocab_size, manifest.limits.max_seq_len, text=text, tokens=tokens, window=window
    )
    source = _recorded_source(manifest) if against is None else open_source(against)
    _check_same(config, source)
    if threads is not None:
        torch.set_num_threads(threads)
    with Stages(progress) as stages:
        measured = measure(source, engine_dir, windows, described, threads=threads, stages=stages)
    return {"engine": str(engine_dir), "source": source.path} | measured


def _recorded_source(manifest: Manifest) -> Source:
    try:
        return open_source(manifest.source["path"])
    except QuasarError as error:
        raise QuasarError(f"the model that the engine was built from: {error}; or name one with --against") from None


def _check_same(config: ModelConfig, source: Source) -> None:
    """Raises QuasarError naming the first thing in which the source differs from the engine's model.

    Two spellings of one model pass: RoPE is compared by its tables, and a head that is the embedding may be stored twice.
    """
    other = source.config
    for name in _COMPARED:
        if getattr(config, name) != getattr(other, name):
            raise _another_model(source, f"its {name} is {getattr(other, name)}, the engine's {getattr(config, name)}")
    if architecture_of(config).head_norms != architecture_of(other).head_norms:
        raise _another_model(source, f"it is a {other.architecture}, the engine a {config.architecture}")
    if not math.isclose(config.norm_epsilon, other.norm_epsilon, rel_tol=1e-6):  # a GGUF file stores it in float32
        raise _another_model(source, f"its norm_epsilon is {other.norm_epsilon}, the engine's {config.norm_epsilon}")
    positions = min(config.max_position_embeddings, other.max_position_embeddings, _POSITIONS)
    tables = zip(rope_tables(config, positions), rope_tables(other, positions), strict=True)
    if not all(np.allclose(ours, theirs, atol=1e-3) for ours, theirs in tables):
        raise _another_model(source, "its rotary embeddings differ from the engine's")


def _another_model(source: Source, why: str) -> QuasarError:
    return QuasarError(
        f"{source.path} is another model than the engine's: {why}; give --against the model that the engine was built from"
    )
