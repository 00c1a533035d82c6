"""How linears and the quantization of their inputs become layers.

`WeightOnly`: INT8 weights that are dequantized per output channel, float activations. `Qdq`: the same, behind activations that are
quantized with the scale that calibration fixed and dequantized again, from which TensorRT makes INT8 products. `Plugin`: INT8
weights and activations quantized per token, through the operations of `quasar_trt.plugins`. Linears that the recipe does not
quantize are BF16 in all of them. Of several ranks the linears behind an explicit smoother are partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.builders.network.writer import NetworkWriter
from quasar_trt.checkpoint import FINAL_NORM, HEAD, below_layer
from quasar_trt.engines.cpu_layout import HEAD_ROWS
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins.reference import hadamard_matrix
from quasar_trt.recipe import RESCORED, Recipe

_BF16_ONE = 0x3F80  # its bits
_FINAL_NORM, _HEAD = (name.removesuffix(".weight") for name in (FINAL_NORM, HEAD))


class WeightOnly:
    """Activations between the methods are float tensors [rows, columns].

    config: of a rank. tensors: by checkpoint name, numpy (uint16 stands for the bits of bfloat16), of a rescored head with its
    INT8 codes as `with_int8_head` adds them. dtype: what linears read and write, "bfloat16" or "float32"; everything else is
    float32.
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
        return self._read(self._norm(norm, x), linear)

    def smooth(self, x, linear: str):
        """What `linear`, which has an explicit smoother where it is quantized, reads of x."""
        writer = self.writer
        if not self.recipe.quantizes(linear):
            return writer.cast(x, self.dtype)
        inverse = 1.0 / self.tensors[f"{linear}.smoother"]
        block = self._block(linear)
        if block:  # the matrix is of ones, which BF16 holds, and its 1 / sqrt(size) goes here
            inverse /= math.sqrt(block)
        y = writer.multiply(writer.cast(x, "float32"), writer.constant(inverse))
        if block:
            y = self._hadamard(writer.cast(y, self.dtype), inverse.size, block)
        return self._read(y, linear)

    def silu_mul(self, gate, up, linear: str):
        """What `linear` reads of silu(gate) * up."""
        writer = self.writer
        gate, up = writer.cast(gate, "float32"), writer.cast(up, "float32")
        return self.smooth(writer.multiply(writer.multiply(gate, writer.sigmoid(gate)), up), linear)

    def linear(self, name: str, x):
        """[rows, in_features] -> [rows, out_features]."""
        return self._biased(name, self._product(name, x, self.recipe.quantizes(name)))

    def summed_linear(self, name: str, x):
        """`linear` where each rank has a share of the columns: the sum over ranks, and then the bias, which all of them hold."""
        if self.config.tp_size == 1:
            return self.linear(name, x)
        partial = self._product(name, x, self.recipe.quantizes(name))
        return self._biased(name, self.writer.sum_over_ranks(partial, self.config.tp_size))

    def head(self, x):
        """Logits [rows, vocab] of x float32, before the final norm."""
        writer, config = self.writer, self.config
        logits = self._head_product(x)
        if self.recipe.lm_head == "rescored":
            logits = self._rescored(logits, x)
        if config.tp_size == 1:
            return logits
        logits = writer.join_columns(logits, config.tp_size)
        return writer.part(logits, 0, config.vocab_size)  # without the padding, which comes last

    def _head_product(self, x):
        """The head's logits of x before anything is rescored."""
        return self._product(_HEAD, self.final_states(x), self.recipe.lm_head in ("int8", "rescored"))

    def _rescored(self, logits, x):
        """The largest logits of each row replaced by those of the BF16 head."""
        writer = self.writer
        count = min(RESCORED, self.config.logits_size)
        best = writer.top_indices(logits, count)
        rows = writer.cast(writer.gather(writer.constant(self.tensors[HEAD_ROWS]), best), self.dtype)
        columns = writer.reshape(self.final_states(x), (-1, self.config.hidden_size, 1))
        exact = writer.reshape(writer.multiply_matrices(rows, columns), (-1, count))
        return writer.replace_columns(logits, best, exact)

    def final_states(self, x):
        """x float32 behind the final norm, in `dtype`."""
        return self.writer.cast(self._norm(_FINAL_NORM, x), self.dtype)

    def _norm(self, name: str, x):
        return self.rms_norm(x, self.tensors[f"{name}.weight"][None])

    def _read(self, y, linear: str):
        """What `linear` reads of its smoothed input."""
        return self.writer.cast(y, self.dtype)

    def _product(self, name: str, x, quantized: bool):
        """x times the weight of checkpoint name `name`, which is INT8 if `quantized`; without the bias."""
        writer = self.writer
        weight = writer.constant(self.tensors[f"{name}.weight"])
        if quantized:
            scale = writer.constant(self.tensors[f"{name}.per_channel_scale"], (weight.shape[0],))
            weight = writer.dequantize_rows(weight, scale, self.dtype)
        return writer.multiply_matrices(x, writer.cast(weight, self.dtype), transpose=True)

    def _biased(self, name: str, y):
        writer, bias = self.writer, self.tensors.get(f"{name}.bias")
        return y if bias is None else writer.add(y, writer.cast(writer.constant(bias, (1, bias.size)), self.dtype))

    def rms_norm(self, x, weight: np.ndarray):
        """RMSNorm over the last axis of x, float32 (arXiv 1910.07467); weight BF16, of as many axes as x."""
        writer, rank = self.writer, weight.ndim
        x = writer.cast(x, "float32")
        mean = writer.mean(writer.multiply(x, x), rank - 1)
        root = writer.square_root(writer.add(mean, writer.scalar(self.config.norm_epsilon, rank)))
        normed = writer.divide(x, root)
        # Those of a rotated model are ones. For each other weight TensorRT-RTX has a kernel, alike but for a comment of its values.
        if (weight == _BF16_ONE).all():
            return normed
        return writer.multiply(normed, writer.cast(writer.constant(weight), "float32"))

    def _block(self, linear: str) -> int:
        """Columns of the Hadamard blocks before a linear, 0 for none."""
        return self.blocks.get(below_layer(linear), 0)

    def _hadamard(self, x, columns: int, block: int):
        """Each block of columns times the Hadamard matrix of ones."""
        writer = self.writer
        matrix = writer.cast(writer.constant(hadamard_matrix(block).sign().numpy()), self.dtype)
        blocks = writer.reshape(x, (-1, block))
        return writer.reshape(writer.multiply_matrices(blocks, matrix), (-1, columns))


class Qdq(WeightOnly):
    """What a linear of a fixed scale reads is at the values that its codes hold."""

    name = "qdq"

    def _read(self, y, linear: str):
        if not self.recipe.is_static(linear):
            return super()._read(y, linear)
        writer = self.writer
        scale = writer.constant(self.tensors[f"{linear}.act_scale"], ())
        return writer.dequantize(writer.quantize(writer.cast(y, "float32"), scale), scale, self.dtype)


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
        return self._quantized_product(name, x, self.recipe.activations, self.tensors.get(f"{name}.bias"))

    def _product(self, name: str, x, quantized: bool):
        if not quantized:
            return super()._product(name, x, quantized)
        return self._quantized_product(name, x, self.recipe.activations)

    def _head_product(self, x):
        if self.recipe.lm_head == "bf16":
            return super()._head_product(x)
        return self._quantized_product(_HEAD, self._quantized_norm(_FINAL_NORM, x, 16), 16)

    def _quantized_norm(self, norm: str, x, activations: int):
        weight = self.writer.constant(self.tensors[f"{norm}.weight"])
        return self.writer.plugin("rms_norm_quantize", x, weight, eps=self.config.norm_epsilon, activations=activations)

    def _smoothed(self, operation: str, *inputs, linear: str):
        inverse = self.writer.constant(1.0 / self.tensors[f"{linear}.smoother"].reshape(-1))
        attributes = {"hadamard": self._block(linear), "activations": self.recipe.activations}
        return self.writer.plugin(operation, *inputs, inverse, **attributes)

    def _quantized_product(self, name: str, x, activations: int, bias: np.ndarray | None = None):
        operation = "linear"
        tensors = [self.tensors[f"{name}.weight"], self.tensors[f"{name}.per_channel_scale"].reshape(-1)]
        if bias is not None:
            operation = "linear_bias"
            tensors.append(bias)
        constants = map(self.writer.constant, tensors)
        (y,) = self.writer.plugin(operation, *x, *constants, activations=activations, output=self.dtype)
        return y


def lowering_of(recipe: Recipe, takes_plugins: bool) -> type[WeightOnly]:
    """How the quantized linears of `recipe` are written."""
    if recipe.static_activations:
        return Qdq
    return Plugin if takes_plugins and recipe.quantized else WeightOnly
