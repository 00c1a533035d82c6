"""Fidelity on request: of an engine directory that was built before, against its source or another model of the same shape."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch

from quasar_trt.builders.fidelity import measure
from quasar_trt.builders.fidelity_text import fidelity_windows
from quasar_trt.builders.progress import Stages
from quasar_trt.builders.source import Source, open_source
from quasar_trt.checkpoint import Checkpoint
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.model_config import ModelConfig
from quasar_trt.tokenizer import load_tokenizer


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
    """Raises QuasarError naming the first field in which the source differs from the engine's model."""
    for field in dataclasses.fields(ModelConfig):
        engine, other = getattr(config, field.name), getattr(source.config, field.name)
        # A GGUF file stores in float32 what a config.json spells out.
        same = math.isclose(engine, other, rel_tol=1e-6) if isinstance(engine, float) else engine == other
        if not same:
            raise QuasarError(
                f"{source.path} is another model than the engine's: its {field.name} is {other}, the engine's {engine}; "
                "give --against the model that the engine was built from"
            )
