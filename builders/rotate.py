"""The rotation of the residual stream that the weights of a rotated checkpoint carry."""

from __future__ import annotations

import torch
from torch import Tensor

_SEED = 0


def rotation(hidden_size: int) -> Tensor:
    """A random orthogonal matrix, float32 [hidden_size, hidden_size], always the same: the stream x becomes x @ Q.

    The Q factor of a normal matrix, its columns' signs those that make the diagonal of R positive, is uniform over the
    orthogonal matrices (Mezzadri, arXiv math-ph/0609050).
    """
    generator = torch.Generator().manual_seed(_SEED)
    q, r = torch.linalg.qr(torch.randn(hidden_size, hidden_size, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).float()
