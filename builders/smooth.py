"""SmoothQuant: activation outliers moved into the weights, one factor per input channel (arXiv 2211.10438, eq. 4).

A linear reads x / s and holds W * s, which leaves their product unchanged. Behind a norm the division is folded into the
norm's weight; elsewhere the engine divides by an explicit smoother.
"""

from __future__ import annotations

import torch

# The bounds of stock TensorRT-LLM tools below, and their mirror image above.
_SMALLEST, _LARGEST = 1e-5, 1e5


def smoother(input_maxima: torch.Tensor, weight_maxima: torch.Tensor, alpha: float) -> torch.Tensor:
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), float32 [columns], finite and above 0.

    A channel that carried nothing in calibration, or that no weight reads, is left alone: s_j = 1.
    """
    dead = (input_maxima == 0) | (weight_maxima == 0)
    s = input_maxima.float() ** alpha / weight_maxima.float() ** (1.0 - alpha)
    return s.clamp(_SMALLEST, _LARGEST).masked_fill(dead, 1.0)


def fold(norm: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Folds a smoother into a norm: (norm weight bfloat16 [columns], factor float32 [columns] for the linears' columns).

    The linears are scaled by norm / stored, not by s, so that rounding the stored weight costs nothing. Where the norm
    weight is 0 the channel is 0 for good and its columns keep the factor s.
    """
    stored = (norm.float() / s).to(torch.bfloat16)
    factor = norm.float() / stored.float()
    return stored, torch.where(stored == 0, s, factor)
