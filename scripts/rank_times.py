#!/usr/bin/env python3
"""Time of a decode step by number of ranks and link, from measured or stated computing and a stated link model.

    scripts/rank_times.py cpu ENGINE_DIR...    engines of one model for 1 and more ranks: measures what one rank computes
    scripts/rank_times.py gpu                  shapes of published models on GPUs, 8 in a node; nothing is measured

docs/ranks.md explains both tables.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.manifest import Manifest

GPUS_PER_NODE = 8
GPU_BANDWIDTH = 0.8 * 3.35e12  # bytes/s: what long reads get of an H100's memory, by its data sheet
ROWS = 6  # one committed token and five draft tokens
# layers, hidden, intermediate, heads, key/value heads, head, vocabulary
SHAPES = {
    "Llama-3.1-8B": (32, 4096, 14336, 32, 8, 128, 128256),
    "Llama-3.1-70B": (80, 8192, 28672, 64, 8, 128, 128256),
}


@dataclass(frozen=True)
class Link:
    """latency: seconds of a message without bytes. bandwidth: bytes/s of each rank, to and fro alike."""

    name: str
    latency: float
    bandwidth: float

    def sum(self, num_ranks: int, num_bytes: float) -> float:
        """Seconds of a sum over ranks: every byte is sent to be added and sent again to be shared."""
        return self._steps(num_ranks) + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bandwidth

    def gather(self, num_ranks: int, num_bytes: float) -> float:
        """Seconds until one rank has the `num_bytes` of each other one."""
        return self._steps(num_ranks) + (num_ranks - 1) * num_bytes / self.bandwidth

    def _steps(self, num_ranks: int) -> float:
        return math.ceil(math.log2(num_ranks)) * self.latency


CPU_LINKS = (
    Link("shared memory", 1e-6, 5e9),
    Link("100 Gbit/s", 5e-6, 12.5e9),
    Link("10 Gbit/s", 20e-6, 1.25e9),
    Link("1 Gbit/s", 50e-6, 0.125e9),
)
NVLINK, BETWEEN_NODES = Link("NVLink", 3e-6, 450e9), Link("400 Gbit/s", 8e-6, 50e9)


def cpu_collectives(engine: CpuEngine, num_ranks: int, rows: int, link: Link) -> float:
    """Seconds, as docs/ranks.md counts the collectives of the cpu engine. Excluded linears are taken for quantized ones."""
    config, recipe = engine.config, engine.recipe
    logits = link.gather(num_ranks, 4 * rows * config.logits_size)
    if not recipe.quantized:
        return 2 * config.num_hidden_layers * link.gather(num_ranks, 4 * rows * config.hidden_size) + logits
    width = 4 if recipe.activations == 8 else 8
    layer = link.sum(num_ranks, 4 * rows) + link.sum(num_ranks, width * rows * config.hidden_size)
    return 2 * config.num_hidden_layers * layer + logits


def open_rank_0(directory: Path) -> CpuEngine:
    """Rank 0's part with one thread, whose collectives do nothing."""
    size = Manifest.open(directory).tp_size
    idle = dict.fromkeys(("largest", "add", "gather", "collect"), id)
    ranks = SimpleNamespace(rank=0, size=size, collectives=idle, watch=lambda progress: None) if size > 1 else None
    return CpuEngine(directory / "rank0.engine", max_seq_len=256, threads=1, ranks=ranks)


def computing(engine: CpuEngine, rows: int) -> float:
    """Seconds of a step at a context of 128 tokens, the median of 40."""

    def reject(*_) -> Acceptance:
        return Acceptance((0,), 0)

    sequence, seconds = engine.open(), []
    engine.step([SequenceStep(sequence, [0] * 128)], reject)
    for _ in range(40):
        began = perf_counter()
        engine.step([SequenceStep(sequence, [0], Draft((0,) * (rows - 1)))], reject)
        seconds.append(perf_counter() - began)
        engine.truncate(sequence, 128)
    engine.close(sequence)
    return statistics.median(seconds)


def print_row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|")


def cpu_table(directories: list[Path]) -> None:
    print_row("engine", "ranks", "rows", "computing", *(link.name for link in CPU_LINKS))
    print_row("---", *["--:"] * (3 + len(CPU_LINKS)))
    for directory in directories:
        engine = open_rank_0(directory)
        size = engine.config.tp_size
        for rows in (1, ROWS):
            seconds = computing(engine, rows)
            steps = [seconds + (cpu_collectives(engine, size, rows, link) if size > 1 else 0) for link in CPU_LINKS]
            weights = "INT8" if engine.recipe.quantized else "BF16"
            print_row(weights, size, rows, *(f"{each * 1e3:.1f}" for each in (seconds, *steps)))


def gpu_step(shape: tuple[int, ...], weight_bytes: int, num_ranks: int) -> tuple[float, float]:
    """(seconds of a step, of which in sums over ranks): BF16 sums, within nodes first, then of each rank's share between them."""
    layers, hidden, intermediate, heads, kv_heads, head, vocab = shape
    linears = layers * hidden * (head * (2 * heads + 2 * kv_heads) + 3 * intermediate)
    computed = (linears * weight_bytes + 2 * vocab * hidden) / num_ranks / GPU_BANDWIDTH
    near, nodes = min(num_ranks, GPUS_PER_NODE), math.ceil(num_ranks / GPUS_PER_NODE)
    num_bytes = 2 * ROWS * hidden
    within = NVLINK.sum(near, num_bytes) if near > 1 else 0
    between = BETWEEN_NODES.sum(nodes, num_bytes / near) if nodes > 1 else 0
    communicated = 2 * layers * (within + between)
    return computed + communicated, communicated


def gpu_table() -> None:
    sizes = (1, 2, 4, 8, 16, 32)
    print_row("model", "weights", *(f"{size} GPU{'s' * (size > 1)}" for size in sizes))
    print_row("---", "---", *["--:"] * len(sizes))
    for name, shape in SHAPES.items():
        for weights, weight_bytes in (("BF16", 2), ("INT8", 1)):
            steps = [gpu_step(shape, weight_bytes, size) for size in sizes]
            print_row(name, weights, *(f"{total * 1e3:.2f} ({part / total:.0%})" for total, part in steps))


if __name__ == "__main__":
    if sys.argv[1:] == ["gpu"]:
        gpu_table()
    elif len(sys.argv) > 2 and sys.argv[1] == "cpu":
        cpu_table([Path(directory) for directory in sys.argv[2:]])
    else:
        sys.exit(__doc__)
