#!/usr/bin/env python3
"""Time of a decode step by number of ranks and link, from a measured or stated time to read weights and a stated link model.

    scripts/rank_times.py cpu ENGINE_DIR...    engines of one model for 1, 2, ... ranks: measures what one rank computes
    scripts/rank_times.py gpu                  published shapes on GPUs, up to 8 in a node; nothing is measured

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

from random_checkpoint import SHAPES

from quasar_trt.builders.hf_config import model_config
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.engines.cpu_layout import packed_spec
from quasar_trt.manifest import Manifest
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config

GPUS_PER_NODE = 8
GPU_BANDWIDTH = 3.35e12 * 0.8  # bytes/s that an H100's memory gives to long reads, by its data sheet


@dataclass(frozen=True)
class Link:
    """Seconds until a message of no bytes arrives, and bytes/s of one rank."""

    name: str
    latency: float
    bandwidth: float

    def collective(self, num_ranks: int, num_bytes: float, volume: float) -> float:
        """Of `num_bytes` per rank; volume: how often those cross a rank's link."""
        return math.ceil(math.log2(num_ranks)) * self.latency + volume * num_bytes / self.bandwidth


MEMORY = Link("memory", 1e-6, 5e9)
NETWORKS = (Link("100 Gbit/s", 3e-6, 12.5e9), Link("10 Gbit/s", 15e-6, 1.25e9), Link("1 Gbit/s", 50e-6, 0.125e9))
NVLINK, INFINIBAND = Link("NVLink", 3e-6, 450e9), Link("InfiniBand", 8e-6, 50e9)


def sum_volume(num_ranks: int) -> float:
    """Of sums: each byte is sent once to be added up and once to be shared."""
    return 2 * (num_ranks - 1) / num_ranks


def cpu_seconds(config: ModelConfig, recipe: Recipe, num_ranks: int, rows: int, link: Link) -> float:
    """In the collectives of the cpu engine's step."""
    volume, layers = sum_volume(num_ranks), config.num_hidden_layers
    logits = link.collective(num_ranks, 4 * rows * -(-config.vocab_size // num_ranks), num_ranks - 1)
    if not recipe.quantized:
        return 2 * layers * link.collective(num_ranks, 4 * rows * config.hidden_size, num_ranks - 1) + logits
    maxima = link.collective(num_ranks, 4 * rows, volume)
    width = 4 if recipe.activations == 8 else 8
    return 2 * layers * (maxima + link.collective(num_ranks, width * rows * config.hidden_size, volume)) + logits


def gpu_seconds(config: ModelConfig, num_ranks: int, rows: int) -> float:
    """In two sums of BF16 per layer, first within nodes, then of an eighth each between them."""
    near, nodes = min(num_ranks, GPUS_PER_NODE), math.ceil(num_ranks / GPUS_PER_NODE)
    num_bytes = 2 * rows * config.hidden_size
    within = NVLINK.collective(near, num_bytes, sum_volume(near)) if near > 1 else 0
    between = INFINIBAND.collective(nodes, num_bytes / near, sum_volume(nodes)) if nodes > 1 else 0
    return 2 * config.num_hidden_layers * (within + between)


def rank_seconds(directory: Path, rows: int) -> float:
    """Of a step of rank 0 whose collectives do nothing: the median of 40, at a context of 128 tokens, with one thread."""
    manifest = Manifest.open(directory)
    idle = dict.fromkeys(("largest", "add", "gather", "collect"), id)
    ranks = SimpleNamespace(rank=0, size=manifest.tp_size, collectives=idle, watch=lambda progress: None)
    engine = CpuEngine(
        directory / "rank0.engine", max_seq_len=256, threads=1, ranks=ranks if manifest.tp_size > 1 else None
    )
    sequence, seconds = engine.open(), []
    engine.step([SequenceStep(sequence, [0] * 128)], lambda *_: Acceptance((0,), 0))
    for _ in range(40):
        began = perf_counter()
        engine.step([SequenceStep(sequence, [0] * rows)], lambda *_: Acceptance((0,), 0))
        seconds.append(perf_counter() - began)
        engine.truncate(sequence, 128)
    return statistics.median(seconds)


def print_row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|")


def cpu_table(directories: list[Path]) -> None:
    from quasar_trt.checkpoint import Checkpoint

    links = (MEMORY, *NETWORKS)
    print_row("ranks", "rows", "computed, ms", *(f"step over {link.name}, ms" for link in links))
    print_row(*["--:"] * (3 + len(links)))
    for directory in directories:
        checkpoint = Checkpoint.open(directory / "checkpoint")
        size = checkpoint.tp_size
        for rows in (1, 6):
            computed = rank_seconds(directory, rows)
            steps = [
                computed + (cpu_seconds(checkpoint.config, checkpoint.recipe, size, rows, link) if size > 1 else 0)
                for link in links
            ]
            print_row(size, rows, *(f"{seconds * 1e3:.1f}" for seconds in (computed, *steps)))


def gpu_table() -> None:
    sizes = (1, 2, 4, 8, 16, 32)
    print_row("model", "weights", *(f"{size} GPU{'s' * (size > 1)}" for size in sizes))
    print_row("---", "---", *["--:"] * len(sizes))
    for name in ("llama-3.1-8b", "llama-3.1-70b"):
        config = model_config(SHAPES[name])
        for weights, recipe in (("BF16", Recipe("none")), ("INT8", Recipe("int8", lm_head="bf16"))):
            cells = []
            for size in sizes:
                if config.num_key_value_heads % size:
                    cells.append("-")
                    continue
                spec = packed_spec(rank_config(config, size), recipe)
                num_bytes = sum(
                    each.nbytes for key, each in spec.items() if key.endswith(".weight") and len(each.shape) == 4
                )
                communicated = gpu_seconds(config, size, rows=6)
                total = num_bytes / GPU_BANDWIDTH + communicated
                cells.append(f"{total * 1e3:.2f} ({communicated / total:.0%})")
            print_row(name, weights, *cells)


if __name__ == "__main__":
    if sys.argv[1:] == ["gpu"]:
        gpu_table()
    elif len(sys.argv) > 2 and sys.argv[1] == "cpu":
        cpu_table([Path(directory) for directory in sys.argv[2:]])
    else:
        sys.exit(__doc__)
