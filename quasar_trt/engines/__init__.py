"""Engines by name, and the choice between them."""

from __future__ import annotations

import sys
from pathlib import Path

from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError, unknown
from quasar_trt.machine import STACKS, gpu, version_of
from quasar_trt.manifest import Manifest


def _open_cpu(directory: Path, manifest: Manifest, threads: int | None) -> Engine:
    from quasar_trt.engines.cpu import CpuEngine

    return CpuEngine(directory / "rank0.engine", max_seq_len=manifest.limits.max_seq_len, threads=threads)


def _open_reference(directory: Path, manifest: Manifest, threads: int | None) -> Engine:
    import torch

    from quasar_trt.engines.reference import ReferenceEngine

    if threads is not None:
        torch.set_num_threads(threads)
    return ReferenceEngine.from_dir(directory)


ENGINES = {"cpu": _open_cpu, "reference": _open_reference}
GPU_STACKS = tuple(name for name in STACKS if name.startswith("tensorrt"))


def default_engine() -> str:
    """The fastest engine of this machine; says so on stderr when it is not the native one."""
    from quasar_trt.plugins import native

    if not native.UNAVAILABLE:
        return "cpu"
    print(f"warning: using the slow reference engine: {native.UNAVAILABLE}", file=sys.stderr)
    return "reference"


def open_engine(directory: Path, engine: str = "auto", threads: int | None = None) -> Engine:
    """Opens an engine directory after checking its manifest (sizes, format version, header hashes).

    engine: "auto" or a key of `ENGINES`. threads: for the engine's own work, default all cores.
    Raises QuasarError.
    """
    directory = Path(directory)
    if engine in GPU_STACKS:
        raise _no_gpu_engine(engine)
    if engine != "auto" and engine not in ENGINES:
        raise unknown("engine", engine, ["auto", *ENGINES])
    if threads is not None and threads < 1:
        raise QuasarError(f"threads is {threads}; allowed: 1 or more")
    manifest = Manifest.open(directory)
    return ENGINES[default_engine() if engine == "auto" else engine](directory, manifest, threads)


def _no_gpu_engine(name: str) -> QuasarError:
    """What is missing for an engine on a GPU stack, and what runs here instead."""
    missing = ["this version has no such engine"]
    if gpu() is None:
        missing.append("no NVIDIA GPU was found")
    if version_of(name) is None:
        missing.append(f"the package {name} is not installed")
    return QuasarError(f"engine '{name}' cannot run: {', '.join(missing)}; on a CPU use: {', '.join(ENGINES)}")
