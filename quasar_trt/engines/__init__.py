"""Engines by name, and the choice between them."""

from __future__ import annotations

import sys
from pathlib import Path

from quasar_trt.communicator import Communicator
from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError, unknown
from quasar_trt.manifest import Manifest
from quasar_trt.tensor_parallel import check_ranks
from quasar_trt.tensorrt_llm_stack import LLM_TARGET


def _open_cpu(
    directory: Path,
    manifest: Manifest,
    threads: int | None,
    ranks: Communicator | None = None,
    beside: Engine | None = None,
) -> Engine:
    from quasar_trt.engines.cpu import CpuEngine

    if manifest.target != "cpu":
        raise QuasarError(
            f"{directory} was built for target '{manifest.target}', engine 'cpu' runs target 'cpu'; on a CPU use engine "
            "'reference', or build it with --target cpu"
        )
    path = directory / f"rank{ranks.rank if ranks else 0}.engine"
    beside = beside if isinstance(beside, CpuEngine) else None
    return CpuEngine(path, max_seq_len=manifest.limits.max_seq_len, threads=threads, beside=beside, ranks=ranks)


def _open_reference(directory: Path, manifest: Manifest, threads: int | None) -> Engine:
    import torch

    from quasar_trt.engines.reference import ReferenceEngine

    if threads is not None:
        torch.set_num_threads(threads)
    return ReferenceEngine.from_dir(directory)


def _refuse_threads(engine: str, threads: int | None) -> None:
    if threads is not None:
        raise QuasarError(
            f"threads is {threads}; engine '{engine}' has no use for it, its work is the GPU's: leave it out"
        )


def _open_tensorrt(
    directory: Path, manifest: Manifest, threads: int | None, ranks: Communicator | None = None
) -> Engine:
    from quasar_trt.engines.tensorrt import TensorRTEngine

    _refuse_threads("tensorrt", threads)
    return TensorRTEngine.from_dir(directory, ranks)


def _open_tensorrt_llm(
    directory: Path, manifest: Manifest, threads: int | None, ranks: Communicator | None = None
) -> Engine:
    from quasar_trt.engines.tensorrt_llm import TensorRTLLMEngine

    _refuse_threads("tensorrt_llm", threads)
    return TensorRTLLMEngine.from_dir(directory, ranks)


ENGINES = {
    "cpu": _open_cpu,
    "reference": _open_reference,
    "tensorrt": _open_tensorrt,
    "tensorrt_llm": _open_tensorrt_llm,
}
MOST_THREADS = 1024
OF_SEVERAL_RANKS = ("cpu", "tensorrt", "tensorrt_llm")  # those that also take the ranks


def default_engine() -> str:
    """The fastest engine of this machine; says so on stderr when it is not the native one."""
    from quasar_trt.plugins import native

    if not native.UNAVAILABLE:
        return "cpu"
    print(f"warning: using the slow reference engine: {native.UNAVAILABLE}", file=sys.stderr)
    return "reference"


def engine_of(manifest: Manifest) -> str:
    """What "auto" is for an engine directory."""
    if manifest.target == "cpu":
        return default_engine()
    return "tensorrt_llm" if manifest.target == LLM_TARGET else "tensorrt"


def open_engine(
    directory: Path, engine: str = "auto", threads: int | None = None, beside: Engine | None = None
) -> Engine:
    """Opens an engine directory after checking its manifest (sizes, format version, header hashes).

    engine: a key of `ENGINES`, or "auto" for the one of the directory's target. threads: for the engine's own work, default all
    cores.
    beside: an open engine that this one drafts for, never at the same time: they share native threads where both have such.
    Of several ranks rank 0 alone returns, with an engine that all of them run (see `ranks.lead`), or that it alone runs beside
    another. Raises QuasarError.
    """
    from quasar_trt.ranks import lead

    leader = None if beside else lead()
    directory = Path(directory)
    if engine != "auto" and engine not in ENGINES:
        raise unknown("engine", engine, ["auto", *ENGINES])
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise QuasarError(f"threads is {threads}; allowed: 1 to {MOST_THREADS}")
    manifest = Manifest.open(directory)
    if engine == "auto":
        engine = engine_of(manifest)
    check_ranks(directory, manifest.tp_size, leader.ranks.size if leader else 1)
    if leader is None:
        if engine == "cpu":
            return _open_cpu(directory, manifest, threads, beside=beside)
        return ENGINES[engine](directory, manifest, threads)
    if engine not in OF_SEVERAL_RANKS:
        raise QuasarError(
            f"engine '{engine}' runs a single rank, {directory} has tp_size {manifest.tp_size}; engines for several ranks: "
            f"{', '.join(OF_SEVERAL_RANKS)}"
        )
    return leader.open(directory, engine, threads)
