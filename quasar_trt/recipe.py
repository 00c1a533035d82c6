"""How an engine's weights are stored and its activations quantized."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quasar_trt.errors import QuasarError, named_options, unknown
from quasar_trt.model_config import stored_fields

QUANTIZATIONS = ("int8", "none")
SMOOTHQUANT = 0.5  # the textbook's exponent
# What `to_dict` spells out and `from_dict` need not read.
_DERIVED = ("weight_bits", "activation_bits", "activation_granularity", "head_bits")


@named_options("recipe option")
@dataclass(frozen=True)
class Recipe:
    """What `quasar-trt build` does to the weights.

    quantization: "int8" (W8A8: weights symmetric per output channel, activations symmetric per row, dynamic) or
        "none" (BF16 weights, float activations: the honest baseline).
    smoothquant: one exponent alpha for all of s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) (SmoothQuant, arXiv 2211.10438,
        eq. 4). None: searched for each group of linears by the error of their output; with "none" nothing is smoothed.
    quantize_lm_head: the head as INT8 per row; its activations keep 16 bits.

    Raises QuasarError for a value that is not allowed, and for an option that "none" has no use for.
    """

    quantization: str = "int8"
    smoothquant: float | None = None
    quantize_lm_head: bool = False

    def __post_init__(self):
        if self.quantization not in QUANTIZATIONS:
            raise unknown("quantization", str(self.quantization), QUANTIZATIONS)
        if not isinstance(self.quantize_lm_head, bool):
            raise QuasarError(f"quantize_lm_head is {self.quantize_lm_head!r}; allowed: true, false")
        if not self.quantized:
            self.refuse_unused(smoothquant=self.smoothquant, quantize_lm_head=self.quantize_lm_head or None)
        elif self.smoothquant is not None and not (
            isinstance(self.smoothquant, int | float) and 0 <= self.smoothquant <= 1
        ):
            raise QuasarError(f"smoothquant is {self.smoothquant}; allowed: 0 to 1")

    @property
    def quantized(self) -> bool:
        return self.quantization != "none"

    def refuse_unused(self, **options: object) -> None:
        """Raises QuasarError naming the first of `options` that is given (not None) although nothing is quantized."""
        for name, value in options.items():
            if value is not None and not self.quantized:
                raise QuasarError(
                    f"{name} has no use with quantization '{self.quantization}'; leave it out, or use quantization 'int8'"
                )

    def to_dict(self) -> dict:
        """The recipe as stored in manifests and checkpoints, with what it implies spelled out."""
        values = dataclasses.asdict(self)
        if not self.quantized:
            return values | {"weight_bits": 16, "activation_bits": None, "head_bits": 16}
        return values | {
            "weight_bits": 8,
            "activation_bits": 8,
            "activation_granularity": "per_token",
            "head_bits": 8 if self.quantize_lm_head else 16,
        }

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        """The inverse of `to_dict`. Raises QuasarError for values that this version cannot have written."""
        return cls(**stored_fields(cls, values, "recipe", _DERIVED))
