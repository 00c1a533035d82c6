"""The searched smoothing: each group of linears gets the smoother that keeps its quantized output closest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quasar_trt.builders.smooth import smoother
from quasar_trt.plugins.reference import hadamard
from quasar_trt.recipe import SMOOTHQUANT

ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_ROWS = 1024  # a candidate is judged on this many rows, evenly spread over the texts,
_OUTPUTS = 1024  # and on this many output channels, evenly spread over the group's


@dataclass(frozen=True)
class Choice:
    """The smoother [columns] of a group, how it was made, and the relative error that quantizing with it leaves.

    alpha, statistic: of `smoother`; None where nothing is smoothed. static_error: `Trial.static_error`, of a static recipe.
    """

    alpha: float | None
    statistic: str | None
    error: float
    smoother: Tensor
    static_error: float | None = None

    def report(self) -> dict:
        report = {"alpha": self.alpha, "statistic": self.statistic, "error": self.error}
        return report if self.static_error is None else report | {"static_error": self.static_error}


def input_statistics(x: Tensor, sampled: Tensor) -> dict[str, Tensor]:
    """What may stand for the size of each channel of x [rows, columns], name -> float32 [columns].

    max|x|; three times the root mean square, which for a normal channel is near its maximum but heeds no single row; the
    smallest |x| that 99 % of the `sampled` rows do not exceed.
    """
    ordered = sampled.abs().T.contiguous()
    return {
        "max": x.abs().amax(dim=0),
        "3rms": 3 * x.square().mean(dim=0).sqrt(),
        "p99": ordered.kthvalue(math.ceil(0.99 * len(sampled)), dim=1).values,
    }


class Trial:
    """The float output of weight [n, columns] for x [rows, columns], and how far quantized ones are from it.

    block: columns of the Hadamard blocks between smoothing and quantization, 0 for none. activations: bits of the input's
    codes. Its buffers serve all candidates: asking the system for new memory each time would take longer than filling it.
    """

    def __init__(self, x: Tensor, weight: Tensor, block: int = 0, activations: int = 8):
        self.x, self._weight = _spread(x, _ROWS), _spread(weight, _OUTPUTS)
        self.weight_maxima = weight.abs().amax(dim=0)
        self._block = block
        self._limit = 2 ** (activations - 1) - 1
        self._output = self.x @ self._weight.T
        self._size = float(torch.linalg.vector_norm(self._output, dtype=torch.float64))
        self._input, self._scaled = torch.empty_like(self.x), torch.empty_like(self._weight)
        self._difference = torch.empty_like(self._output)

    def error(self, s: Tensor) -> float:
        """|Q(x / s) Q(weight * s)^T - output| / |output| (Frobenius norms), Q symmetric per row, s [columns].

        0 where the output is all 0, NaN or infinite where the output is.
        """
        if self._size == 0:
            return 0.0
        q = self._rounded(torch.div(self.x, s, out=self._input), self._limit)
        w = self._rounded(torch.mul(self._weight, s, out=self._scaled), 127)
        torch.addmm(self._output, q, w.T, beta=-1, out=self._difference)
        return float(torch.linalg.vector_norm(self._difference, dtype=torch.float64)) / self._size

    def static_error(self, s: Tensor, scale: Tensor) -> float:
        """The mean over rows of |(Q(x / s) - x / s) (weight * s)^T| / |x weight^T|, Q with one `scale` for all of x.

        By row, because one far above the others, which a fixed scale serves well, would hide what it does to those. A row of
        zeros has the error 0.
        """
        y = self._transformed(self.x / s)
        lost = (y / scale).round_().clamp_(-128, 127).mul_(scale).sub_(y)
        torch.mm(lost, self._transformed(self._weight * s).T, out=self._difference)
        sizes = self._output.norm(dim=1)
        return float((self._difference.norm(dim=1) / sizes)[sizes > 0].sum() / len(sizes))

    def _rounded(self, y: Tensor, limit: int) -> Tensor:
        """y [rows, columns] after the Hadamard transform, at the values that codes with a scale per row can hold."""
        y = self._transformed(y)
        largest = torch.maximum(y.amax(dim=1, keepdim=True), -y.amin(dim=1, keepdim=True))
        scale = (largest / limit).clamp_min_(torch.finfo(torch.float32).tiny)
        return y.div_(scale).round_().mul_(scale)

    def _transformed(self, y: Tensor) -> Tensor:
        return hadamard(y, self._block) if self._block else y


def _spread(rows: Tensor, most: int) -> Tensor:
    """At most so many of the rows, evenly spread."""
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, most, dtype=torch.float64).long()]


def search(x: Tensor, trial: Trial) -> Choice | None:
    """The smoother of least `Trial.error` that the search meets, for inputs x [rows, columns].

    For each statistic it starts at the textbook's exponent and follows the falling error, up or else down: over the
    exponent the error has one valley. So the choice is never worse than (max, 0.5), which wins a tie. None when no error
    is finite.
    """
    best = None
    for statistic, sizes in input_statistics(x, trial.x).items():

        def attempt(alpha: float, statistic=statistic, sizes=sizes) -> Choice:
            s = smoother(sizes, trial.weight_maxima, alpha)
            return Choice(alpha, statistic, trial.error(s), s)

        found = _descend(attempt)
        if math.isfinite(found.error) and (best is None or found.error < best.error):
            best = found
    return best


def _descend(attempt: Callable[[float], Choice]) -> Choice:
    start = best = attempt(SMOOTHQUANT)
    for direction in (1, -1):
        index = ALPHAS.index(SMOOTHQUANT) + direction
        while 0 <= index < len(ALPHAS):
            found = attempt(ALPHAS[index])
            if not found.error < best.error:
                break
            best = found
            index += direction
        if best is not start:
            break
    return best
