"""How linears and the quantization of their inputs become layers.

`WeightOnly`: INT8 weights that are dequantized per output channel, float activations. `Plugin`: INT8 weights and activations
quantized per token, through the operations of `quasar_trt.plugins`. Linears that the recipe does not quantize are BF16 in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.builders.network.writer import NetworkWriter
from quasar_trt.checkpoint import FINAL_NORM, HEAD, below_layer
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins.reference import hadamard_matrix
from quasar_trt.recipe import Recipe

_FINAL_NORM, _HEAD = (name.removesuffix(".weight") for name in (FINAL_NORM, HEAD))


class WeightOnly:
    """Activations between the methods are float tensors [rows, columns].

    tensors: by checkpoint name, numpy (uint16 stands for the bits of bfloat16). dtype: what linears read and write,
    "bfloat16" or "float32"; everything else is float32.
    """

    name = "weight_only"

    def __init__(
        self, writer: NetworkWriter, config: ModelConfig, recipe: Recipe, tensors: Mapping[str, np.ndarray], dtype: str
    ):
        self.writer = writer
        self.config = config
        self.recipe = recipe
        self.tensors = tensors
        self.dtype = dtype
        self.blocks = hadamard_blocks(config, recipe)

    def norm(self, norm: str, x, linear: str):
        """What `linear`, which reads `norm`, and those beside it read: RMSNorm of x float32."""
        return self.writer.cast(self.rms_norm(norm, x), self.dtype)

    def smooth(self, x, linear: str):
        """What `linear`, which has an explicit smoother where it is quantized, reads of x."""
        writer = self.writer
        if not self.recipe.quantizes(linear):
            return writer.cast(x, self.dtype)
        inverse = 1.0 / self.tensors[f"{linear}.smoother"]
        block = self._block(linear)
        if block:  # the matrix is of ones, which BF16 holds, and its 1 / sqrt(size) goes here
            inverse /= math.sqrt(block)
        y = writer.cast(writer.multiply(writer.cast(x, "float32"), writer.constant(inverse)), self.dtype)
        return self._hadamard(y, inverse.size, block) if block else y

    def silu_mul(self, gate, up, linear: str):
        """What `linear` reads of silu(gate) * up."""
        writer = self.writer
        gate, up = writer.cast(gate, "float32"), writer.cast(up, "float32")
        return self.smooth(writer.multiply(writer.multiply(gate, writer.sigmoid(gate)), up), linear)

    def linear(self, name: str, x):
        """[rows, in_features] -> [rows, out_features]."""
        return self._product(name, x, self.recipe.quantizes(name))

    def head(self, x):
        """Logits [rows, vocab] of x float32, before the final norm."""
        x = self.writer.cast(self.rms_norm(_FINAL_NORM, x), self.dtype)
        return self._product(_HEAD, x, self.recipe.lm_head == "int8")

    def _product(self, name: str, x, quantized: bool):
        """x times the weight of checkpoint name `name`, which is INT8 if `quantized`."""
        writer = self.writer
        weight = writer.constant(self.tensors[f"{name}.weight"])
        if quantized:
            scale = writer.constant(self.tensors[f"{name}.per_channel_scale"], (weight.shape[0],))
            weight = writer.dequantize_rows(weight, scale, self.dtype)
        y = writer.multiply_matrices(x, writer.cast(weight, self.dtype), transpose=True)
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else writer.add(y, writer.cast(writer.constant(bias, (1, bias.size)), self.dtype))

    def rms_norm(self, norm: str, x, rank: int = 2):
        """RMSNorm over the last axis of x of that rank, float32 (arXiv 1910.07467)."""
        writer = self.writer
        x = writer.cast(x, "float32")
        mean = writer.mean(writer.multiply(x, x), rank - 1)
        root = writer.square_root(writer.add(mean, writer.scalar(self.config.norm_epsilon, rank)))
        weight = self.tensors[f"{norm}.weight"]
        weight = writer.cast(writer.constant(weight, (1,) * (rank - 1) + weight.shape), "float32")
        return writer.multiply(writer.divide(x, root), weight)

    def _block(self, linear: str) -> int:
        """Columns of the Hadamard blocks before a linear, 0 for none."""
        return self.blocks.get(below_layer(linear), 0)

    def _hadamard(self, x, columns: int, block: int):
        """Each block of columns times the Hadamard matrix of ones."""
        writer = self.writer
        matrix = writer.cast(writer.constant(hadamard_matrix(block).sign().numpy()), self.dtype)
        blocks = writer.reshape(x, (-1, block))
        return writer.reshape(writer.multiply_matrices(blocks, matrix), (-1, columns))


class Plugin(WeightOnly):
    """What a quantized linear reads is (codes [rows, columns], scale float32 [rows]); 16-bit codes are INT8 in pairs."""

    name = "plugin"

    def norm(self, norm: str, x, linear: str):
        if not self.recipe.quantizes(linear):
            return super().norm(norm, x, linear)
        return self._quantized_norm(norm, x, self.recipe.activations)

    def smooth(self, x, linear: str):
        if not self.recipe.quantizes(linear):
            return super().smooth(x, linear)
        return self._smoothed("smooth_quantize", x, linear=linear)

    def silu_mul(self, gate, up, linear: str):
        if not self.recipe.quantizes(linear):
            return super().silu_mul(gate, up, linear)
        return self._smoothed("silu_mul_smooth_quantize", gate, up, linear=linear)

    def linear(self, name: str, x):
        if not self.recipe.quantizes(name):
            return super().linear(name, x)
        return self._quantized_product(name, x, self.recipe.activations)

    def head(self, x):
        if self.recipe.lm_head != "int8":
            return super().head(x)
        return self._quantized_product(_HEAD, self._quantized_norm(_FINAL_NORM, x, 16), 16)

    def _quantized_norm(self, norm: str, x, activations: int):
        weight = self.writer.constant(self.tensors[f"{norm}.weight"])
        return self.writer.plugin("rms_norm_quantize", x, weight, eps=self.config.norm_epsilon, activations=activations)

    def _smoothed(self, operation: str, *inputs, linear: str):
        inverse = self.writer.constant(1.0 / self.tensors[f"{linear}.smoother"].reshape(-1))
        attributes = {"hadamard": self._block(linear), "activations": self.recipe.activations}
        return self.writer.plugin(operation, *inputs, inverse, **attributes)

    def _quantized_product(self, name: str, x, activations: int):
        tensors = [self.tensors[f"{name}.weight"], self.tensors[f"{name}.per_channel_scale"].reshape(-1)]
        operation, bias = "linear", self.tensors.get(f"{name}.bias")
        if bias is not None:
            operation = "linear_bias"
            tensors.append(bias)
        constants = map(self.writer.constant, tensors)
        (y,) = self.writer.plugin(operation, *x, *constants, activations=activations, output=self.dtype)
        return y
