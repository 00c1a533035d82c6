"""Several ranks that run plans together, each on a GPU of its own: who takes which, and how their NCCL meets.

What ranks say to each other goes through MPI. Between GPUs it goes through NCCL, within the plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.errors import QuasarError


class Ranks(Protocol):
    """What is used of `communicator.Communicator`."""

    rank: int
    size: int
    hosts: list[str]

    def exchange(self, value: object) -> list: ...

    def watch(self, progress: Callable[[], int]) -> None: ...


Prepared = TypeVar("Prepared")


def device_of(ranks: Ranks | None) -> CudaDevice:
    """The GPU of this rank: ranks of one machine take its GPUs in turn, as far as each sees them. Raises QuasarError as
    `CudaDevice` does."""
    if ranks is None:
        return CudaDevice()
    return CudaDevice(ranks.hosts[: ranks.rank].count(ranks.hosts[ranks.rank]))


def join(ranks: Ranks, prepare: Callable[[], tuple[Prepared, str]]) -> tuple[Prepared, object]:
    """What `prepare` made on this rank, and the NCCL communicator of all ranks, a capsule; called by all of them.

    prepare: also returns the name that no other GPU has. Raises what `prepare` raises, on other ranks QuasarError with it, and
    QuasarError where ranks share a GPU and for a torch without NCCL.
    """
    problem = prepared = gpu = identity = None
    try:
        prepared, gpu = prepare()
        identity = _nccl().unique_id() if ranks.rank == 0 else None
    except Exception as error:
        problem = error
    found = ranks.exchange((None if problem is None else str(problem), gpu, identity))
    if problem is not None:
        raise problem
    for rank, (said, _, _) in enumerate(found):
        if said is not None:
            raise QuasarError(f"rank {rank} on {ranks.hosts[rank]}: {said}")
    gpus = [gpu for _, gpu, _ in found]
    shared = [rank for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    if shared:
        raise QuasarError(
            f"ranks {', '.join(map(str, shared))} share a GPU; start no more ranks on a machine than it has GPUs, and let each see its own"
        )
    return prepared, _nccl().init_rank(ranks.size, found[0][2], ranks.rank)


def _nccl():
    if not hasattr(torch._C, "_nccl_unique_id"):
        raise QuasarError(f"torch {torch.__version__} is built without NCCL, which several ranks need")
    return torch.cuda.nccl
