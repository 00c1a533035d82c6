"""A part of the check for machines with a GPU: what it found, or why it cannot run."""

from __future__ import annotations

from dataclasses import dataclass, field

from quasar_trt.tables import FigureTable


class NotRun(Exception):
    """Why a part cannot run on this machine."""


@dataclass(frozen=True)
class Outcome:
    """figures: what JSON can hold. failure: what went wrong, "" when nothing did."""

    figures: dict
    tables: list[FigureTable] = field(default_factory=list)
    failure: str = ""


def need_gpu() -> None:
    """Raises NotRun without a CUDA device that torch can use, or without Triton."""
    import torch

    if not torch.cuda.is_available():
        raise NotRun(f"torch {torch.__version__} finds no CUDA device")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise NotRun(f"Triton cannot be imported ({error}); pip install 'quasar-trt[triton]'") from None
