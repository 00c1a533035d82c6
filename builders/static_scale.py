"""The scale of a linear's input that calibration fixes once, for all rows of all passes."""

from __future__ import annotations

import torch
from torch import Tensor

# A group whose rows have a larger mean error with it reads an unquantized input (docs/tensorrt.md has what each bound gives).
LARGEST_STATIC_ERROR = 0.02


def static_scale(y: Tensor) -> Tensor:
    """max|y| / 127 over all of y [rows, columns], float32 [1]; 1 where y is all 0.

    A maximum of rows far apart leaves few codes for the small ones. No part of it is cut off: the largest rows are what
    attention rests on (massive activations, arXiv 2402.17762), and losing them costs more.
    """
    largest = y.abs().amax()
    return torch.where(largest > 0, largest / 127, torch.ones_like(largest)).reshape(1)
