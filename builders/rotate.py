"""Rotation of the residual stream, folded into the weights (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406).

With x the residual stream and Q orthogonal, the rotated model carries x Q: what writes into the stream is multiplied by Q,
what reads from it undoes Q. A norm without weights commutes with Q, so its weight moves into the linears behind it. The
model computes the same; no channel of the stream is an outlier any more. All products are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quasar_trt.architectures import architecture_of
from quasar_trt.checkpoint import LAYER_PREFIX
from quasar_trt.model_config import ModelConfig

_SEED = 0
_ROWS = 8192  # of a vocabulary, at a time


def rotation(hidden_size: int) -> Tensor:
    """The same random orthogonal matrix Q at every call, float32 [hidden_size, hidden_size], uniform among all of them."""
    generator = torch.Generator().manual_seed(_SEED)
    normal = torch.randn(hidden_size, hidden_size, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    return (q * r.diagonal().sign()).float()


def rotate_layer(config: ModelConfig, i: int, tensors: dict[str, Tensor], q: Tensor) -> dict[str, Tensor]:
    """Layer i of the rotated model, its linears float32 and the weights of its norms ones; `tensors` are unquantized."""
    architecture = architecture_of(config)
    prefix = LAYER_PREFIX.format(i=i)
    rotated = dict(tensors)
    for norm in architecture.norms:
        rotated[f"{prefix}{norm}.weight"] = torch.ones(config.hidden_size)
    for linear in architecture.linears:
        name = f"{prefix}{linear.name}"
        weight = tensors[f"{name}.weight"].float()
        if linear.norm is not None:
            rotated[f"{name}.weight"] = (weight * tensors[f"{prefix}{linear.norm}.weight"].float()) @ q
            continue
        rotated[f"{name}.weight"] = q.T @ weight
        if f"{name}.bias" in tensors:
            rotated[f"{name}.bias"] = tensors[f"{name}.bias"].float() @ q
    return rotated


def rotate_vocabulary(weight: Tensor, q: Tensor, norm: Tensor | None = None) -> Tensor:
    """The embedding [vocab_size, hidden_size], or with its norm [hidden_size] the head, of the rotated model, BF16."""
    rotated = torch.empty(weight.shape, dtype=torch.bfloat16)
    for start in range(0, len(weight), _ROWS):
        rows = weight[start : start + _ROWS].float()
        rotated[start : start + _ROWS] = (rows if norm is None else rows * norm.float()) @ q
    return rotated
