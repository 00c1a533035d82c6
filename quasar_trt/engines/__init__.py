"""Engines by name, and the choice between them."""

from __future__ import annotations

import sys
from pathlib import Path

from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError, unknown
from quasar_trt.manifest import Manifest


def _open_cpu(directory: Path, manifest: Manifest, threads: int | None, beside: Engine | None) -> Engine:
    from quasar_trt.engines.cpu import CpuEngine

    if manifest.plan is not None:
        raise QuasarError(
            f"{directory} was built for target '{manifest.target}', engine 'cpu' runs target 'cpu'; on a CPU use engine "
            "'reference', or build it with --target cpu"
        )
    beside = beside if isinstance(beside, CpuEngine) else None
    return CpuEngine(
        directory / "rank0.engine", max_seq_len=manifest.limits.max_seq_len, threads=threads, beside=beside
    )


def _open_reference(directory: Path, manifest: Manifest, threads: int | None, beside: Engine | None) -> Engine:
    import torch

    from quasar_trt.engines.reference import ReferenceEngine

    if threads is not None:
        torch.set_num_threads(threads)
    return ReferenceEngine.from_dir(directory)


def _open_tensorrt(directory: Path, manifest: Manifest, threads: int | None, beside: Engine | None) -> Engine:
    from quasar_trt.engines.tensorrt import TensorRTEngine

    return TensorRTEngine.from_dir(directory)


ENGINES = {"cpu": _open_cpu, "reference": _open_reference, "tensorrt": _open_tensorrt}


def default_engine() -> str:
    """The fastest engine of this machine; says so on stderr when it is not the native one."""
    from quasar_trt.plugins import native

    if not native.UNAVAILABLE:
        return "cpu"
    print(f"warning: using the slow reference engine: {native.UNAVAILABLE}", file=sys.stderr)
    return "reference"


def open_engine(
    directory: Path, engine: str = "auto", threads: int | None = None, beside: Engine | None = None
) -> Engine:
    """Opens an engine directory after checking its manifest (sizes, format version, header hashes).

    engine: "auto" or a key of `ENGINES`. threads: for the engine's own work, default all cores. beside: an open engine, never
    used at once with this one, whose native threads it shares where both have such.
    Raises QuasarError.
    """
    directory = Path(directory)
    if engine != "auto" and engine not in ENGINES:
        raise unknown("engine", engine, ["auto", *ENGINES])
    if threads is not None and threads < 1:
        raise QuasarError(f"threads is {threads}; allowed: 1 or more")
    manifest = Manifest.open(directory)
    if engine == "auto":
        engine = default_engine() if manifest.plan is None else "tensorrt"
    return ENGINES[engine](directory, manifest, threads, beside)
