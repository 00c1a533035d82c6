"""The shape of a decoder: what every engine, builder and drafter needs to know about a model, in TensorRT-LLM's words."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from quasar_trt.errors import QuasarError

# Field -> its smallest value. A sequence is at least a prompt token and the one that follows it.
_SIZES = {
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_size": 1,
    "vocab_size": 1,
    "max_position_embeddings": 2,
    "tp_size": 1,
}
_FLAGS = ("qkv_bias", "dense_bias", "mlp_bias", "tie_word_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one decoder-only model (names are those of a TensorRT-LLM checkpoint's config.json).

    Nothing here assumes hidden_size == num_attention_heads * head_size, a tied head or the absence of biases.
    Raises QuasarError naming the field for a value of another type or outside its range, heads that the KV heads do not
    divide and an odd head_size. The architecture and the parameters of rotary_scaling are checked by those who know them.
    """

    architecture: str  # Hugging Face class name, a key of `architectures.ARCHITECTURES`
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: dict | None = None  # as in Hugging Face: {"rope_type": ..., ...}; None is plain RoPE
    qkv_bias: bool = False
    dense_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    # Positions that some layers see, where that is fewer than all; engines see all, which is the same up to so many tokens.
    sliding_window: int | None = None
    # Above 1 this is one rank's share of a model, see `tensor_parallel.rank_config`.
    tp_size: int = 1

    def __post_init__(self):
        if not isinstance(self.architecture, str):
            raise QuasarError(f"architecture is {self.architecture!r}; it must be a name")
        for name, least in _SIZES.items():
            whole_number(name, getattr(self, name), least)
        if self.sliding_window is not None:
            whole_number("sliding_window", self.sliding_window)
        if self.num_attention_heads % self.num_key_value_heads:
            raise QuasarError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_size % 2:
            raise QuasarError(f"head_size is {self.head_size}; it must be even, rotary embeddings rotate pairs")
        for name in ("norm_epsilon", "rotary_base"):
            object.__setattr__(self, name, positive_number(name, getattr(self, name)))
        if not isinstance(self.rotary_scaling, dict | None):
            raise QuasarError(f"rotary_scaling is {self.rotary_scaling!r}; it must be an object or null")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise QuasarError(f"{name} is {getattr(self, name)!r}; it must be true or false")

    @property
    def kv_size(self) -> int:
        """Rows of the k projection, and of the v projection."""
        return self.num_key_value_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        """Rows of the fused q, k, v projection."""
        return self.attention_size + 2 * self.kv_size

    @property
    def attention_size(self) -> int:
        """Columns of the attention output projection."""
        return self.num_attention_heads * self.head_size

    @property
    def logits_size(self) -> int:
        """Rows of the head: of vocab_size, padded to a multiple of tp_size, one rank's share. The padding is at the end."""
        return -(-self.vocab_size // self.tp_size)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> ModelConfig:
        """The inverse of `to_dict`. Raises QuasarError for values that this version cannot have written."""
        return cls(**stored_fields(cls, values, "model"))


def whole_number(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """`value` itself. Raises QuasarError naming it unless it is an int of at least `least`, and at most `most` where that is given."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bound = "" if most is None else f", at most {most}"
        raise QuasarError(f"{name} is {value!r}; it must be a whole number of at least {least}{bound}")
    return value


def positive_number(name: str, value: object) -> float:
    """`value` as a float. Raises QuasarError naming it unless it is a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise QuasarError(f"{name} is {value!r}; it must be a finite number above 0")
    return float(value)


def derived_head_size(hidden_size: object, num_attention_heads: object) -> int:
    """The head size of a source that names none. Raises QuasarError unless the heads divide hidden_size."""
    size = whole_number("hidden_size", hidden_size)
    heads = whole_number("num_attention_heads", num_attention_heads)
    if size % heads:
        raise QuasarError(
            f"hidden_size {size} is not a multiple of num_attention_heads {heads}, and no head size is given"
        )
    return size // heads


def stored_fields(cls: type, values: object, what: str, derived: Iterable[str] = ()) -> dict:
    """The fields of dataclass `cls` out of stored `values`; `derived` are keys that follow from them.

    Raises QuasarError, which calls the values `what`, when a key is missing or is not known to this version.
    """
    if not isinstance(values, dict):
        raise QuasarError(f"{what} is {values!r}; it must be an object")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    foreign = values.keys() - fields.keys() - set(derived)
    if foreign:
        raise QuasarError(
            f"{what} has {', '.join(sorted(foreign))}, unknown here: it was built by a newer version; update quasar-trt, or build again"
        )
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    if missing:
        raise QuasarError(f"{what} lacks {', '.join(missing)}")
    return {name: value for name, value in values.items() if name in fields}
