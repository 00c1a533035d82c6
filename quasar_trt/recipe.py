"""How an engine's weights are stored and its activations quantized."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quasar_trt.errors import QuasarError, named_options, unknown

QUANTIZATIONS = ("int8", "none")


@named_options("recipe option")
@dataclass(frozen=True)
class Recipe:
    """What `quasar-trt build` does to the weights.

    quantization: "int8" (W8A8: weights symmetric per output channel, activations symmetric per row, dynamic) or
        "none" (BF16 weights, float activations: the honest baseline).
    smoothquant: the exponent alpha of s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) (SmoothQuant, arXiv 2211.10438, eq. 4).
    quantize_lm_head: the head as INT8 per row; its activations keep 16 bits.
    """

    quantization: str = "int8"
    smoothquant: float = 0.5
    quantize_lm_head: bool = False

    def __post_init__(self):
        if self.quantization not in QUANTIZATIONS:
            raise unknown("quantization", self.quantization, QUANTIZATIONS)
        if not 0.0 <= self.smoothquant <= 1.0:
            raise QuasarError(f"smoothquant is {self.smoothquant}; allowed: 0 to 1")
        if self.quantize_lm_head and not self.quantized:
            raise QuasarError("quantize_lm_head needs quantization 'int8', not 'none'")

    @property
    def quantized(self) -> bool:
        return self.quantization != "none"

    def to_dict(self) -> dict:
        """The recipe as stored in manifests and checkpoints, with what it implies spelled out."""
        values = dataclasses.asdict(self)
        if not self.quantized:
            return values | {"smoothquant": None, "weight_bits": 16, "activation_bits": None, "head_bits": 16}
        return values | {
            "weight_bits": 8,
            "activation_bits": 8,
            "activation_granularity": "per_token",
            "head_bits": 8 if self.quantize_lm_head else 16,
        }

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in names and value is not None})
