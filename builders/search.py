"""The searched smoothing: layer by layer, each group gets the smoother that keeps its quantized output closest.

The hidden states of the calibration texts move from layer to layer through the layers already quantized, so every group
is fitted to the input that it will really get. One layer's activations are in memory at a time.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quasar_trt.builders.calibrate import ChannelMaxima
from quasar_trt.builders.progress import Advance
from quasar_trt.builders.quantize import quantize_rows
from quasar_trt.builders.smooth import Group, Tensors, fold, model_groups, smoother
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import SMOOTHQUANT, Recipe

ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_ROWS = 1024  # a candidate is judged on this many rows, evenly spread over the texts


@dataclass(frozen=True)
class Choice:
    """The smoother [columns] found for a group, how it was made, and the relative error that quantizing with it leaves."""

    alpha: float
    statistic: str
    error: float
    smoother: Tensor

    def report(self) -> dict:
        return {"alpha": self.alpha, "statistic": self.statistic, "error": self.error}


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

    Its buffers serve all candidates: asking the system for new memory each time would take longer than filling it.
    """

    def __init__(self, x: Tensor, weight: Tensor):
        self._x, self._weight = x, weight
        self._output = x @ weight.T
        self._size = float(torch.linalg.vector_norm(self._output, dtype=torch.float64))
        self._input, self._scaled = torch.empty_like(x), torch.empty_like(weight)
        self._difference = torch.empty_like(self._output)

    def error(self, s: Tensor) -> float:
        """|Q(x / s) Q(weight * s)^T - output| / |output| (Frobenius norms), Q symmetric INT8 per row, s [columns].

        0 where the output is all 0, NaN or infinite where the output is.
        """
        if self._size == 0:
            return 0.0
        q = _round_rows(torch.div(self._x, s, out=self._input))
        w = _round_rows(torch.mul(self._weight, s, out=self._scaled))
        torch.addmm(self._output, q, w.T, beta=-1, out=self._difference)
        return float(torch.linalg.vector_norm(self._difference, dtype=torch.float64)) / self._size


def _round_rows(y: Tensor) -> Tensor:
    """y [rows, columns] at the values that INT8 codes with a scale per row can hold, in place."""
    largest = torch.maximum(y.amax(dim=1, keepdim=True), -y.amin(dim=1, keepdim=True))
    scale = (largest / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    return y.div_(scale).round_().mul_(scale)


def choose(x: Tensor, weight: Tensor) -> Choice | None:
    """The smoother of least `Trial.error` that the search meets, for inputs x [rows, columns] of weight [n, columns].

    For each statistic it starts at the textbook's exponent and follows the falling error, up or else down: over the
    exponent the error has one valley. So the choice is never worse than (max, 0.5), which wins a tie. None when no error
    is finite.
    """
    spread = torch.linspace(0, len(x) - 1, min(len(x), _ROWS), dtype=torch.float64, device=x.device).long()
    sampled = x[spread]
    trial = Trial(sampled, weight)
    columns = weight.abs().amax(dim=0)
    best = None
    for statistic, sizes in input_statistics(x, sampled).items():

        def attempt(alpha: float, statistic=statistic, sizes=sizes) -> Choice:
            s = smoother(sizes, columns, alpha)
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


class _Quantizing:
    """Observer of a `ReferenceModel` that quantizes each linear at the moment when its input is known.

    layer: what it writes the linear's quantized tensors to; the model reads them from there. The norm before it has not
    absorbed the smoother at that time, so here every linear divides by one.
    """

    def __init__(self, config: ModelConfig, tensors: Tensors, layer: dict[str, Tensor]):
        self.maxima = ChannelMaxima()
        self.choices: dict[str, Choice] = {}
        self._tensors = tensors
        self._layer = layer
        self._groups = {group.name: group for group in model_groups(config)}

    def __call__(self, name: str, x: Tensor) -> None:
        self.maxima(name, x)
        if name in self._groups:  # the first of its group to run
            self._quantize(self._groups[name], x)

    def _quantize(self, group: Group, x: Tensor) -> None:
        weights = [self._tensors[f"{name}.weight"].float() for name in group.linears]
        choice = choose(x, torch.cat(weights))
        if choice is None:
            raise QuasarError(
                f"calibration reached NaN or infinity at the output of {group.name}; the model cannot be built"
            )
        self.choices[group.name] = choice
        divisor = choice.smoother
        if group.norm is not None:
            divisor = fold(self._tensors[f"{group.norm}.weight"], divisor)[1]
        for name, weight in zip(group.linears, weights, strict=True):
            self._layer[f"{name}.weight"], self._layer[f"{name}.per_channel_scale"] = quantize_rows(weight * divisor)
            self._layer[f"{name}.smoother"] = divisor


@torch.no_grad()
def search_smoothers(
    config: ModelConfig, tensors: Tensors, texts: Sequence[Sequence[int]], advance: Advance
) -> tuple[dict[str, Choice], ChannelMaxima]:
    """(group name -> choice, what the inputs were) for the model of unquantized `tensors`. Calls `advance(1)` per layer.

    Raises QuasarError naming the first linear whose input or output is not finite.
    """
    layer: dict[str, Tensor] = {}
    observer = _Quantizing(config, tensors, layer)
    model = ReferenceModel(config, Recipe(), ChainMap(layer, tensors), observe=observer)
    x = rotations = None
    for i in range(config.num_hidden_layers):
        batch = [(ids, model.new_cache()) for ids in texts]  # new ones: a layer's keys are of no use to the next
        if x is None:
            x, rotations = model.embed(batch), model.rotations(batch)
        x = model.layer(i, x, batch, rotations)
        layer.clear()
        advance(1)
    return observer.choices, observer.maxima
