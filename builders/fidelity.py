"""Fidelity: how far a built engine is from its source model on given text, measured in bounded memory.

Distributions: P is the source's next-token distribution, computed in float32, Q the one that the opened engine gives; both
at temperature 1. Layers: the hidden states of both after every layer, of the engine as its checkpoint computes them
(engines/reference.py). One layer of the source is in memory at a time, and logits for a block of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quasar_trt.builders.comparison import Comparison
from quasar_trt.builders.convert import Converter
from quasar_trt.builders.hidden_states import HiddenStates
from quasar_trt.builders.progress import Stages
from quasar_trt.builders.rotate import rotation
from quasar_trt.builders.source import Source
from quasar_trt.checkpoint import EMBEDDING, FINAL_NORM, HEAD, Checkpoint
from quasar_trt.drafters.base import Draft
from quasar_trt.engines import open_engine
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel, load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.plugins.reference import rms_norm
from quasar_trt.recipe import Recipe

_LAYER_ROWS = 1024  # rows that are inside of a layer at a time; a longer window goes alone
_LOGIT_ROWS = 64  # rows whose logits are in memory at a time: vocabularies are large
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def measure(
    source: Source,
    engine_dir: Path,
    windows: Sequence[Sequence[int]],
    text: str,
    *,
    threads: int | None = None,
    stages: Stages,
) -> dict:
    """Compares the engine in `engine_dir` with its source on every position of `windows`, each of at least 2 token ids.

    text: what the windows are taken from, for the report. threads: of the engine, all usable CPUs when None.

    Returns the figures of `Comparison.figures`, `layer_errors` (for each layer the mean over positions of
    |engine - source| / |source|, Euclidean norms of the hidden states that leave it) and `text`.
    Raises ValueError when there is no window, or one too short or longer than the engine's max_seq_len, and QuasarError when
    a figure is not finite, for an engine that cannot be opened and for source weights that are not finite.
    """
    if not windows or min(map(len, windows)) < 2:
        raise ValueError("fidelity needs at least one window, each of at least 2 tokens")
    checkpoint = Checkpoint.open(engine_dir / "checkpoint")
    # A plan runs on its own GPU only; the reference engine computes what its checkpoint says.
    is_plan = Manifest.open(engine_dir).target != "cpu"
    engine = ReferenceEngine.from_dir(engine_dir) if is_plan else open_engine(engine_dir, threads=threads)
    longest = max(map(len, windows))
    if longest > engine.max_seq_len:
        raise ValueError(f"a window has {longest} tokens; this engine allows {engine.max_seq_len}")
    converter = Converter(source)
    layer_errors, states = _through_layers(converter, checkpoint, windows, stages)
    states = rms_norm(states, converter[FINAL_NORM], source.config.norm_epsilon)
    figures = _compare_logits(converter, engine, windows, states, stages)
    for name, value in figures.items():
        _check_finite(name, value)
    text = f"{len(windows)} windows of at most {longest} tokens, {text}"
    if is_plan:
        text += "; the plan's checkpoint, as the reference engine computes it"
    return figures | {"layer_errors": layer_errors, "text": text}


def _through_layers(
    converter: Converter, checkpoint: Checkpoint, windows: Sequence[Sequence[int]], stages: Stages
) -> tuple[list[float], Tensor]:
    """The relative error that each layer leaves, and the source's last hidden states, float32 [rows, hidden_size]."""
    config, recipe, tensors = checkpoint.config, checkpoint.recipe, load_tensors(checkpoint.paths[0])
    embedding = converter[EMBEDDING]
    pairs = [
        (
            HiddenStates(config, Recipe("none"), embedding, batch),
            HiddenStates(config, recipe, tensors[EMBEDDING], batch),
        )
        for batch in _batches(windows)
    ]
    del embedding
    back = rotation(config.hidden_size).T if recipe.rotate else None
    advance = stages.stage("Comparing layers", config.num_hidden_layers)
    errors = []
    for i in range(config.num_hidden_layers):
        layer, relative = converter.layer(i), []
        for source, engine in pairs:
            source.advance(i, layer)
            engine.advance(i, tensors)
            rows = engine.rows if back is None else engine.rows @ back
            # A row of zeros stays one in both: the smallest number keeps its error at 0.
            size = source.rows.norm(dim=1).clamp_min(_SMALLEST_NORMAL)
            relative.append((rows - source.rows).norm(dim=1) / size)
        del layer  # before the next one is read
        errors.append(torch.cat(relative).mean().item())
        _check_finite(f"the error of layer {i}", errors[-1])
        advance(1)
    return errors, torch.cat([source.rows for source, _ in pairs])


def _batches(windows: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """The windows in their order, as many together as `_LAYER_ROWS` allows."""
    batches: list[list[Sequence[int]]] = []
    for ids in windows:
        if not batches or sum(map(len, batches[-1])) + len(ids) > _LAYER_ROWS:
            batches.append([])
        batches[-1].append(ids)
    return batches


def _compare_logits(
    converter: Converter, engine: Engine, windows: Sequence[Sequence[int]], states: Tensor, stages: Stages
) -> dict[str, float | int]:
    """states: the source's, after the final norm, float32 [rows, hidden_size]."""
    source = ReferenceModel(converter.config, Recipe("none"), {HEAD: converter[HEAD].float()})
    comparison = Comparison()
    advance = stages.stage("Comparing distributions", len(states))
    for ids, rows in zip(windows, states.split([len(ids) for ids in windows]), strict=True):
        for start, engine_logits in _engine_logits(engine, ids):
            stop = start + len(engine_logits)
            comparison.add(source.logits(rows[start:stop]), engine_logits, ids[start + 1 : stop + 1])
            advance(len(engine_logits))
    return comparison.figures()


def _engine_logits(engine: Engine, ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(first row, logits float32 [rows, vocab]) of blocks of the rows of `ids`, in order.

    A block is one step: its first id is committed, the rest is a draft that is accepted whole, so every row has logits.
    """
    sequence = engine.open()
    try:
        size = min(engine.capabilities.max_rows, _LOGIT_ROWS)
        for start in range(0, len(ids), size):
            first, *drafted = ids[start : start + size]
            blocks: list[Tensor] = []

            def accept(index: int, logits, drafted=drafted, blocks=blocks) -> Acceptance:
                blocks.append(torch.from_numpy(logits.copy()))
                return Acceptance(tuple(drafted), len(drafted))

            engine.step([SequenceStep(sequence, [first], Draft(tuple(drafted)))], accept)
            yield start, blocks[0]
    finally:
        engine.close(sequence)


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise QuasarError(
            f"fidelity to the source cannot be measured: {name} is {value}; the engine or its source leaves float32 on this "
            "text; try other text, or check the model"
        )
