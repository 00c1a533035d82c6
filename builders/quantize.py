"""Symmetric INT8 per output channel, each weight rounded to the nearest code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quasar_trt.checkpoint import HEAD
from quasar_trt.engines.cpu_layout import HEAD_ROWS
from quasar_trt.recipe import Recipe

_ROWS = 8192  # of a vocabulary, quantized at a time
_SMALLEST = 127 * torch.finfo(torch.float32).tiny  # below it the scale itself would not be a normal number


def row_scales(weight: Tensor) -> Tensor:
    """max|row| / 127 of weight float32 [rows, columns], float32 [rows]; 1 for a row of zeros, whose codes are 0."""
    maxima = weight.abs().amax(dim=1)
    return (maxima / 127.0).masked_fill(maxima < _SMALLEST, 1.0)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] float32 -> (codes int8 [rows, columns] in [-127, 127], scale float32 [1, rows]).

    code = round_half_even(w / scale), scale = max|row| / 127.
    """
    scale = row_scales(weight)
    codes = (weight / scale[:, None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scale[None]


def with_int8_head(tensors: Mapping, recipe: Recipe) -> Mapping:
    """tensors of a checkpoint, torch; those of a rescored head with its codes and scales, which follow from its BF16 rows, in their
    place and the rows under `HEAD_ROWS`."""
    if recipe.lm_head != "rescored":
        return tensors
    codes, scale = quantize_vocabulary(tensors[HEAD])
    return {**tensors, HEAD: codes, "lm_head.per_channel_scale": scale, HEAD_ROWS: tensors[HEAD]}


def quantize_vocabulary(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of weight [rows, columns], BF16 or float32, without a float32 copy of all of it."""
    parts = [quantize_rows(part.float()) for part in weight.split(_ROWS)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts], dim=1)
