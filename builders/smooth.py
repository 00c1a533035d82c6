"""SmoothQuant: activation outliers moved into the weights, one factor per input channel (arXiv 2211.10438, eq. 4).

A linear reads x / s and holds W * s, which leaves their product unchanged. Behind a norm the division is folded into the
norm's weight; elsewhere the engine divides by an explicit smoother.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quasar_trt.architectures import architecture_of
from quasar_trt.checkpoint import LAYER_PREFIX
from quasar_trt.model_config import ModelConfig

# The bounds of stock TensorRT-LLM tools below, and their mirror image above.
_SMALLEST, _LARGEST = 1e-5, 1e5


@dataclass(frozen=True)
class Group:
    """Linears that read one input and so share a smoother, by checkpoint names without ".weight".

    norm: what absorbs the smoother, or None where it is explicit.
    """

    linears: tuple[str, ...]
    norm: str | None

    @property
    def name(self) -> str:
        """The name of its first linear."""
        return self.linears[0]


def layer_groups(config: ModelConfig, layer: int) -> list[Group]:
    """The smoothing groups of one layer; every linear is in one of them."""
    prefix = LAYER_PREFIX.format(i=layer)
    linears = architecture_of(config).linears
    found: list[Group] = []
    for linear in linears:
        if linear.norm is None:
            found.append(Group((prefix + linear.name,), None))
        elif all(group.norm != prefix + linear.norm for group in found):
            readers = (prefix + other.name for other in linears if other.norm == linear.norm)
            found.append(Group(tuple(readers), prefix + linear.norm))
    return found


def smoother(input_sizes: torch.Tensor, weight_maxima: torch.Tensor, alpha: float) -> torch.Tensor:
    """s_j = |X_j|^alpha / max|W_j|^(1 - alpha), float32 [columns], finite and above 0; |X_j| is max|X_j| in the textbook.

    A channel that carried nothing in calibration, or that no weight reads, is left alone: s_j = 1.
    """
    dead = (input_sizes == 0) | (weight_maxima == 0)
    s = input_sizes.float() ** alpha / weight_maxima.float() ** (1.0 - alpha)
    return s.clamp(_SMALLEST, _LARGEST).masked_fill(dead, 1.0)


def fold(norm: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Folds a smoother into a norm: (norm weight bfloat16 [columns], factor float32 [columns] for the linears' columns).

    The linears are scaled by norm / stored, not by s, so that rounding the stored weight costs nothing. Where the norm
    weight is 0 the channel is 0 for good and its columns keep the factor s.
    """
    stored = (norm.float() / s).to(torch.bfloat16)
    factor = norm.float() / stored.float()
    return stored, torch.where(stored == 0, s, factor)


def count_extremes(weights: Iterable[torch.Tensor], s: torch.Tensor) -> dict[str, int]:
    """Output channels of a group's weights that are all 0, and input channels whose smoother was held at a bound."""
    return {
        "zero_rows": sum(int((weight == 0).all(dim=1).sum()) for weight in weights),
        "clamped_channels": int(((s <= _SMALLEST) | (s >= _LARGEST)).sum()),
    }
