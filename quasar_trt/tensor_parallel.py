"""Tensor parallel: what one of several ranks computes, and the refusal of any other number of ranks.

Ranks share the heads and the intermediate size (Megatron-LM, arXiv 1909.08053). A linear that reads a norm is split by
output rows; the one that reads its results is split by columns, and the ranks' outputs are summed. The head is split by
rows, the vocabulary padded to a multiple of tp_size; embedding, norms and the residual stream are whole on every rank.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig, whole_number

_SHARED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def rank_config(config: ModelConfig, tp_size: int) -> ModelConfig:
    """What one of `tp_size` ranks computes of the whole model `config`; the same for every rank.

    The checkpoint, the Hadamard blocks and the packed file of a rank follow from it as those of the whole model follow
    from `config`, which it equals for tp_size 1. Its vocab_size is the true one; its `logits_size` rows of the head
    may end in padding. Raises QuasarError, listing the allowed sizes, where tp_size does not divide what ranks share.
    """
    whole_number("tp_size", tp_size)
    sizes = {name: getattr(config, name) for name in _SHARED}
    undivided = [f"{name} {size}" for name, size in sizes.items() if size % tp_size]
    if undivided:
        most = math.gcd(*sizes.values())
        allowed = ", ".join(str(size) for size in range(1, most + 1) if most % size == 0)
        raise QuasarError(
            f"tp_size {tp_size} does not divide {', '.join(undivided)}; allowed for this model: {allowed}"
        )
    return dataclasses.replace(config, tp_size=tp_size, **{name: size // tp_size for name, size in sizes.items()})


def check_ranks(path: Path, tp_size: int, num_ranks: int = 1) -> None:
    """Raises QuasarError where another number of ranks is to run `path` than it was made for."""
    if tp_size == num_ranks:
        return
    if num_ranks == 1:
        raise QuasarError(
            f"{path} has tp_size {tp_size}, and this is a single process; start the program as: mpirun -n {tp_size} ...; or build "
            "with --tp-size 1"
        )
    how = "without mpirun" if tp_size == 1 else f"as: mpirun -n {tp_size} ..."
    raise QuasarError(
        f"{path} has tp_size {tp_size}, and this program runs on {num_ranks} ranks; start it {how}; or build it for another --tp-size"
    )
