"""How an engine's weights are stored and its activations quantized."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quasar_trt.errors import QuasarError, named_options, unknown
from quasar_trt.model_config import stored_fields

QUANTIZATIONS = ("int8", "none")
SMOOTHQUANT = 0.5  # the textbook's exponent
ACTIVATIONS = (8, 16)
ROUNDINGS = ("gptq", "nearest")
LM_HEADS = ("bf16", "int8", "rescored")
RESCORED = 64  # logits of each row
# What `to_dict` spells out and `from_dict` need not read.
_DERIVED = ("weight_bits", "activation_bits", "activation_granularity")


@named_options("recipe option")
@dataclass(frozen=True)
class Recipe:
    """What `quasar-trt build` does to the weights.

    quantization: "int8" (W8A8: weights symmetric per output channel, activations symmetric) or "none" (BF16 weights, float
        activations: the honest baseline).
    smoothquant: one exponent alpha for all of s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) (SmoothQuant, arXiv 2211.10438,
        eq. 4). None: searched for each group of linears by the error of their output; with "none" nothing is smoothed.
    rotate: the residual stream in a basis of a random rotation (in the weights, at no cost), and block Hadamard transforms
        before the linears that have an explicit smoother (at run time). None: where the smoothing is searched.
    rounding: "gptq" rounds each weight so that it makes up for the error of those before it (arXiv 2210.17323); "nearest".
        None: "gptq" with a rotation; without one the activations' error hides what it gains.
    activations: bits of the codes that a quantized linear reads; with 16 the weights alone carry an error worth the name.
    static_activations: the codes of a linear's input have one scale, which calibration fixes, instead of one for each row.
    weight_only: linears, by checkpoint name, that a static scale would cost too much, so that their input is not quantized to
        8 bits; the build lists them.
    exclude: patterns (of fnmatch) of linears that stay in BF16, by checkpoint name, such as "transformer.layers.0.*".
    lm_head: "bf16"; "int8" per row, which reads activations of 16 bits; or "rescored": the INT8 head, whose RESCORED largest
        logits of each row (of each rank's share; ties go to the lower id) are replaced by those of the BF16 head. None: "rescored".

    Raises QuasarError for a value that is not allowed, and for an option that "none" has no use for.
    """

    quantization: str = "int8"
    smoothquant: float | None = None
    rotate: bool | None = None
    rounding: str | None = None
    activations: int | None = None
    exclude: tuple[str, ...] = ()
    lm_head: str | None = None
    static_activations: bool = False
    weight_only: tuple[str, ...] = ()

    def __post_init__(self):
        if self.quantization not in QUANTIZATIONS:
            raise unknown("quantization", str(self.quantization), QUANTIZATIONS)
        if self.rotate is not None and not isinstance(self.rotate, bool):
            raise QuasarError(f"rotate is {self.rotate!r}; allowed: true, false")
        if not isinstance(self.static_activations, bool):
            raise QuasarError(f"static_activations is {self.static_activations!r}; allowed: true, false")
        for field, kind in (("exclude", "patterns of linear names"), ("weight_only", "linear names")):
            names = getattr(self, field)
            if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
                raise QuasarError(f"{field} is {names!r}; allowed: a list of {kind}")
            object.__setattr__(self, field, tuple(names))
        if not self.quantized:
            self.refuse_unused(
                smoothquant=self.smoothquant,
                rotate=self.rotate,
                rounding=self.rounding,
                activations=self.activations,
                exclude=self.exclude or None,
                lm_head=self.lm_head,
                static_activations=self.static_activations or None,
                weight_only=self.weight_only or None,
            )
            return
        alpha = self.smoothquant
        if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1):
            raise QuasarError(f"smoothquant is {alpha}; allowed: 0 to 1")
        rotate = alpha is None if self.rotate is None else self.rotate
        chosen = {
            "rotate": rotate,
            "rounding": self.rounding or ("gptq" if rotate else "nearest"),
            "activations": 8 if self.activations is None else self.activations,
            "lm_head": self.lm_head or "rescored",
        }
        for name, value in chosen.items():
            object.__setattr__(self, name, value)
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", str(self.rounding), ROUNDINGS)
        if self.activations not in ACTIVATIONS:
            raise QuasarError(f"activations is {self.activations!r}; allowed: 8, 16")
        if self.static_activations and self.activations != 8:
            raise QuasarError(
                f"activations is {self.activations}, and static ones have 8 bits; leave out one of activations and static_activations"
            )
        if self.weight_only and not self.static_activations:
            raise QuasarError("weight_only has no use without static_activations; leave it out")
        if self.lm_head not in LM_HEADS:
            raise unknown("lm_head", str(self.lm_head), LM_HEADS)

    @property
    def quantized(self) -> bool:
        return self.quantization != "none"

    def quantizes(self, linear: str) -> bool:
        """Whether the linear of this checkpoint name (without ".weight") is INT8."""
        return self.quantized and not any(fnmatchcase(linear, pattern) for pattern in self.exclude)

    def is_static(self, linear: str) -> bool:
        """Whether that linear is INT8 and reads codes of a fixed scale."""
        return self.static_activations and linear not in self.weight_only and self.quantizes(linear)

    def activation_bits(self, linear: str) -> int:
        """Of the codes that this quantized linear reads; 16 stand for the unquantized input of a weight-only one."""
        return 16 if linear in self.weight_only else self.activations

    def refuse_unused(self, **options: object) -> None:
        """Raises QuasarError naming the first of `options` that is given (not None) although nothing is quantized."""
        for name, value in options.items():
            if value is not None and not self.quantized:
                raise QuasarError(
                    f"{name} has no use with quantization '{self.quantization}'; leave it out, or use quantization 'int8'"
                )

    def to_dict(self) -> dict:
        """The recipe as stored in manifests and checkpoints, with what it implies spelled out."""
        values = dataclasses.asdict(self) | {"exclude": list(self.exclude), "weight_only": list(self.weight_only)}
        if not self.quantized:
            return values | {"weight_bits": 16, "activation_bits": None}
        return values | {
            "weight_bits": 8,
            "activation_bits": self.activations,
            "activation_granularity": "per_tensor" if self.static_activations else "per_token",
        }

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        """The inverse of `to_dict`. Raises QuasarError for values that this version cannot have written."""
        return cls(**stored_fields(cls, values, "recipe", _DERIVED))
