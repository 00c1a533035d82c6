"""Rounding that makes up for its own error (GPTQ, arXiv 2210.17323).

With d the error of one output channel's weights and H = X^T X the second moment of their inputs, the output's squared error
is d H d^T. With H = L L^T, L lower triangular, that is the sum over j of (d_j L_jj + sum_{i > j} d_i L_ij)^2: from the last
column to the first, each weight is rounded from the value that makes its term 0, given the errors of those after it. This is
GPTQ's update in the form of Babai's nearest plane (arXiv 2507.18553), which needs no inverse of H. Columns are taken in
descending order of their H_jj, so the error of the loudest is spread over all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quasar_trt.builders.quantize import row_scales

_DAMPING = 0.01  # of the mean diagonal, added to H: few inputs leave it singular
_BLOCK = 64  # columns whose errors reach the columns before them in one product


def quantize_gptq(weight: Tensor, factor: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """weight float32 [n, k], `input_factor` of its inputs -> (codes int8 [n, k] in [-127, 127], scale float32 [1, n]).

    The scales are those of `quantize_rows`.
    """
    scale = row_scales(weight)
    order, lower = factor
    exact = weight.T[order].contiguous()  # [k, n]: a column's values side by side
    wanted = exact.clone()
    codes = torch.empty_like(exact, dtype=torch.int8)
    errors = torch.empty(_BLOCK, len(weight))
    for stop in range(len(order), 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        block = wanted[start:stop]
        for j in reversed(range(stop - start)):
            code = torch.round(block[j] / scale).clamp_(-127, 127)
            codes[start + j] = code
            error = torch.sub(exact[start + j], code * scale, out=errors[j])
            block[:j].addr_(lower[start + j, start : start + j], error)
        wanted[:start].addmm_(lower[start:stop, :start].T, errors[: stop - start])
    restored = torch.empty_like(codes)
    restored[order] = codes
    return restored.T.contiguous(), scale[None]


def input_factor(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What rounding needs to know of inputs float32 [rows, k], the same for every weight that reads them.

    (order of the columns [k], L [k, k] with each column divided by its diagonal) of the damped H, so ordered.
    """
    smallest = torch.finfo(torch.float32).tiny
    inputs = inputs / inputs.abs().amax().clamp_min(smallest)  # squares of large ones would leave float32
    moment = inputs.T @ inputs
    diagonal = moment.diagonal()
    diagonal += _DAMPING * diagonal.mean() + smallest
    order = diagonal.argsort(stable=True)
    moment = moment[order][:, order]
    lower, failed = torch.linalg.cholesky_ex(moment)
    if failed:
        lower = torch.linalg.cholesky(moment.double()).float()
    return order, lower.div_(lower.diagonal().clone())
