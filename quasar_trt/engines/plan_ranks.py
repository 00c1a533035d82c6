"""Several ranks that run plans together, each on a GPU of its own: who takes which, and how their NCCL meets.

What ranks say to each other goes through MPI. Between GPUs it goes through NCCL, within the plans.
"""

from __future__ import annotations

import torch

from quasar_trt.communicator import Communicator
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.errors import QuasarError


def device_of(ranks: Communicator | None) -> CudaDevice:
    """The GPU of this rank: ranks of one machine take its GPUs in turn, as far as each sees them. Raises QuasarError as
    `CudaDevice` does."""
    if ranks is None:
        return CudaDevice()
    return CudaDevice(ranks.hosts[: ranks.rank].count(ranks.hosts[ranks.rank]))


def nccl_communicator(ranks: Communicator, device: CudaDevice) -> object:
    """The NCCL communicator of all ranks, a capsule; called by all of them. Raises QuasarError, on all of them, where ranks share
    a GPU and for a torch without NCCL."""
    has_nccl = hasattr(torch._C, "_nccl_unique_id")
    identity = torch.cuda.nccl.unique_id() if has_nccl and ranks.rank == 0 else None
    found = ranks.exchange((device.identity, has_nccl, identity))
    gpus = [gpu for gpu, _, _ in found]
    shared = [str(rank) for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    if shared:
        raise QuasarError(
            f"ranks {', '.join(shared)} share a GPU; start no more ranks on a machine than it has GPUs, and let each see its own"
        )
    for rank, (_, has_nccl, _) in enumerate(found):
        if not has_nccl:
            raise QuasarError(
                f"rank {rank} on {ranks.hosts[rank]}: torch {torch.__version__} is built without NCCL, which several ranks need"
            )
    return torch.cuda.nccl.init_rank(ranks.size, found[0][2], ranks.rank)
