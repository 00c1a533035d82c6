"""Fidelity: how far the built engine's distributions are from the source model's, measured on given text.

For every token position of every window, with P the source's and Q the engine's next-token distribution (temperature 1):
KL(P || Q) = sum_v P(v) * (log P(v) - log Q(v)), in float64; whether both have the same most probable token; and the
log probability each gives to the token that really follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.errors import QuasarError

_BLOCK_ROWS = 64  # rows held in float64 at a time: vocabularies are large


def measure(
    source_model: ReferenceModel, engine: Engine, texts: Sequence[Sequence[int]], progress: bool = False
) -> dict[str, float | int | str]:
    """Compares `engine` with `source_model` on every position of `texts`, each a window of at least 2 token ids.

    Returns kl (mean over positions, in nats) and kl_standard_error (positions taken as independent), top1_agreement
    (0 to 1), tokens (positions compared), source_perplexity and engine_perplexity (of each window's tokens after its
    first), text. `progress` shows a bar on stderr. Raises ValueError when there is no window, or one too short or longer
    than the engine's max_seq_len, and QuasarError when a figure is not finite.
    """
    if not texts or min(map(len, texts)) < 2:
        raise ValueError("fidelity needs at least one window, each of at least 2 tokens")
    divergences, agreements, source_next, engine_next = [], [], [], []
    bar = track(
        texts,
        "Measuring fidelity",
        console=Console(stderr=True),
        transient=True,
        disable=not progress,
        show_speed=False,
    )
    for ids in bar:
        source_logits = source_model(ids).cpu()
        start = 0
        for engine_logits in _logits(engine, ids):
            stop = start + len(engine_logits)
            p = source_logits[start:stop].double().log_softmax(dim=-1)
            q = torch.from_numpy(engine_logits).double().log_softmax(dim=-1)
            divergences.append((p.exp() * (p - q)).sum(dim=-1))
            agreements.append(p.argmax(dim=-1) == q.argmax(dim=-1))
            following = torch.tensor(
                ids[start + 1 : stop + 1], dtype=torch.long
            )  # one shorter than the block at the window's end
            source_next.append(_pick(p, following))
            engine_next.append(_pick(q, following))
            start = stop
    kl = torch.cat(divergences)
    figures = {
        "kl": kl.mean().item(),
        "kl_standard_error": kl.std().item() / math.sqrt(len(kl)),
        "top1_agreement": torch.cat(agreements).double().mean().item(),
        "tokens": len(kl),
        "source_perplexity": torch.cat(source_next).mean().neg().exp().item(),
        "engine_perplexity": torch.cat(engine_next).mean().neg().exp().item(),
    }
    for name, value in figures.items():
        if not math.isfinite(value):
            raise QuasarError(f"fidelity to the source cannot be measured: {name} is {value}; the logits leave float32")
    return figures | {"text": f"{len(texts)} windows of at most {max(map(len, texts))} tokens"}


def _pick(log_probs: Tensor, ids: Tensor) -> Tensor:
    """The log probability that row i gives to ids[i], [len(ids)]."""
    return log_probs[torch.arange(len(ids)), ids]


def _logits(engine: Engine, ids: Sequence[int]) -> Iterator[np.ndarray]:
    """The engine's logits for the rows of `ids` in order, in blocks [rows, vocab] float32.

    A block is one step: its first id is committed, the rest is a draft that is accepted whole, so every row has logits.
    """
    sequence = engine.open()
    try:
        size = min(engine.capabilities.max_rows, _BLOCK_ROWS)
        for start in range(0, len(ids), size):
            first, *drafted = ids[start : start + size]
            blocks: list[np.ndarray] = []

            def accept(index: int, logits: np.ndarray, drafted=drafted, blocks=blocks) -> Acceptance:
                blocks.append(logits.copy())
                return Acceptance(tuple(drafted), len(drafted))

            engine.step([SequenceStep(sequence, [first], Draft(tuple(drafted)))], accept)
            yield blocks[0]
    finally:
        engine.close(sequence)
