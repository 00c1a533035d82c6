"""Quantizes a model layer by layer: the hidden states of the calibration texts move through the layers already quantized, so
every group of linears is smoothed and rounded for the input that it will really get."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.builders.gptq import input_factor, quantize_gptq
from quasar_trt.builders.hidden_states import HiddenStates
from quasar_trt.builders.input_sizes import InputSizes
from quasar_trt.builders.quantize import quantize_rows
from quasar_trt.builders.search import Choice, Trial, search
from quasar_trt.builders.smooth import Group, count_extremes, fold, layer_groups, smoother
from quasar_trt.builders.static_scale import LARGEST_STATIC_ERROR, static_scale
from quasar_trt.checkpoint import below_layer
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins import reference as ops
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config


class LayerQuantizer:
    """Takes unquantized layers in their order, gives back the checkpoint's tensors of each.

    embedding: as the engine will hold it. texts: calibration texts as ids. tp_size: ranks that will share the layers.
    choices: what was chosen for each group so far, by its name. inputs: what the linears' inputs were. recipe: as given, with
    the linears so far that a static scale would cost too much.
    """

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        embedding: Tensor,
        texts: Sequence[Sequence[int]],
        tp_size: int = 1,
    ):
        self.choices: dict[str, Choice] = {}
        self.inputs = InputSizes()
        self.recipe = recipe
        self._config = config
        self._blocks = hadamard_blocks(rank_config(config, tp_size), recipe)
        self._states = HiddenStates(config, recipe, embedding, texts, self._observe, self._blocks)
        self._groups: dict[str, Group] = {}
        self._layer: dict[str, Tensor] = {}
        self._finished: dict[str, Tensor] = {}
        self._extremes = {"zero_rows": 0, "clamped_channels": 0}

    @torch.no_grad()
    def __call__(self, i: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Layer i: BF16 or float32 tensors in, those of `checkpoint_spec` out.

        Raises QuasarError naming the first linear whose input or output, or the layer whose output is not finite.
        """
        self._groups = {group.name: group for group in layer_groups(self._config, i)}
        self._layer, self._finished = dict(tensors), {}
        self._states.advance(i, self._layer)
        if not self._states.rows.isfinite().all():
            raise QuasarError(
                f"calibration reached NaN or infinity at the output of layer {i}; the model cannot be built"
            )
        quantized, self._layer, self._finished = self._finished, {}, {}  # nothing of a layer stays for the next
        kept = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items() if name not in quantized}
        return kept | quantized

    def report(self) -> dict:
        """What the calibration saw, for the manifest."""
        return {"tokens": len(self._states.rows)} | self.inputs.report() | self._extremes

    def _observe(self, name: str, x: Tensor) -> None:
        self.inputs(name, x)
        if name in self._groups and self.recipe.quantizes(name):  # the first of its group to run
            self._quantize(self._groups[name], x)

    def _quantize(self, group: Group, x: Tensor) -> None:
        """Adds the quantized tensors of a group to the layer, which is about to read them, and to what is finished.

        The norm before the group has already run and has not absorbed the smoother, so in the layer every linear divides by one.
        """
        weights = {name: self._layer[f"{name}.weight"].float() for name in group.linears}
        block = self._blocks.get(below_layer(group.name), 0)
        trial = Trial(x, torch.cat(list(weights.values())), block, self.recipe.activations)
        choice = self._choose(group, x, trial)
        divisor = choice.smoother
        for name, count in count_extremes(weights.values(), divisor).items():
            self._extremes[name] += count
        if group.norm is None:
            self._finished[f"{group.name}.smoother"] = divisor[None]
        else:
            stored, divisor = fold(self._layer[f"{group.norm}.weight"], divisor)
            self._finished |= {f"{group.norm}.weight": stored, f"{group.norm}.scale_to_int": torch.ones(1)}
        y = ops.smooth(x, 1.0 / divisor, block)
        fixed = {}
        if self.recipe.static_activations:
            fixed = {"act_scale": static_scale(y)}
            choice = dataclasses.replace(choice, static_error=trial.static_error(divisor, fixed["act_scale"]))
            if not choice.static_error <= LARGEST_STATIC_ERROR:
                self._keep_weight_only(group)
        self.choices[group.name] = choice
        rounded = self._rounding(group.name, y, **fixed)
        for name, weight in weights.items():
            scaled = weight * divisor
            codes, scale = rounded(ops.hadamard(scaled, block) if block else scaled)
            stored = {"weight": codes, "per_channel_scale": scale} | fixed
            stored = {f"{name}.{kind}": tensor for kind, tensor in stored.items()}
            self._finished |= stored
            self._layer |= stored | {f"{name}.smoother": divisor}

    def _keep_weight_only(self, group: Group) -> None:
        names = (*self.recipe.weight_only, *group.linears)
        self.recipe = self._states.recipe = dataclasses.replace(self.recipe, weight_only=names)

    def _choose(self, group: Group, x: Tensor, trial: Trial) -> Choice:
        if self.recipe.smoothquant is not None:
            s = smoother(x.abs().amax(dim=0), trial.weight_maxima, self.recipe.smoothquant)
            choice = Choice(self.recipe.smoothquant, "max", trial.error(s), s)
        elif self.recipe.rotate and group.norm is not None:
            s = torch.ones(x.shape[1])  # a rotated stream has no channel that stands out
            choice = Choice(None, None, trial.error(s), s)
        else:
            choice = search(x, trial)
        if choice is None or not math.isfinite(choice.error):
            raise QuasarError(
                f"calibration reached NaN or infinity at the output of {group.name}; the model cannot be built"
            )
        return choice

    def _rounding(
        self, name: str, y: Tensor, act_scale: Tensor | None = None
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """What makes codes and scales of the weights of a group, which all read the same codes of y."""
        if self.recipe.rounding == "nearest":
            return quantize_rows
        if self.recipe.is_static(name):
            q, scale = ops.quantize_static(y, act_scale)
        else:
            q, scale = ops.QUANTIZE[self.recipe.activation_bits(name)](y)
        return partial(quantize_gptq, factor=input_factor(q * scale[:, None]))
