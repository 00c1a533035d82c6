"""What a manifest keeps of compiled TensorRT plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PLAN_HEADER = 4096  # bytes of a plan whose hash is checked whenever it is opened
PLAN_TARGETS = ("tensorrt", "tensorrt-rtx")  # what is compiled into plans, named as the distribution that does it


@dataclass(frozen=True)
class Plan:
    """How the plans of an engine directory were made.

    stack: the distribution that compiled them, one of `PLAN_TARGETS` or "tensorrt-llm"; version: of it, the only one that runs them.
    sms: GPUs that there is a plan for, by compute capability times ten.
    lowering: of quantized linears, "plugin" (activations quantized per token), "qdq" (with scales fixed by calibration) or
        "weight_only" (BF16 activations); of TensorRT-LLM whose modules the network is of, "stock" or "quasar".
    prefill_rows: most rows of a prompt in one pass.
    """

    stack: str
    version: str
    sms: tuple[int, ...]
    lowering: str
    prefill_rows: int

    def __post_init__(self):
        object.__setattr__(self, "sms", tuple(self.sms))  # JSON has lists


def plan_name(sm: int, rank: int = 0) -> str:
    """The plan's file in the engine directory."""
    return f"rank{rank}.sm{sm}.engine"


def plan_header(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(PLAN_HEADER)
