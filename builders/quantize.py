"""Symmetric INT8 per output channel."""

from __future__ import annotations

import torch

_SMALLEST = 127 * torch.finfo(torch.float32).tiny  # below it the scale itself would not be a normal number


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] float32 -> (codes int8 [rows, columns] in [-127, 127], scale float32 [1, rows]).

    code = round_half_even(127 * w / max|row|), scale = max|row| / 127; a row of zeros has codes 0 and scale 1.
    """
    maxima = weight.abs().amax(dim=1, keepdim=True)
    empty = maxima < _SMALLEST
    codes = (weight * 127.0 / maxima.masked_fill(empty, torch.inf)).round().clamp(-127, 127)
    scale = (maxima / 127.0).masked_fill(empty, 1.0)
    return codes.to(torch.int8), scale.T.contiguous()
