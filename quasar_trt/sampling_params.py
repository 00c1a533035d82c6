"""What a caller may ask of one request (names and defaults are vLLM's)."""

from __future__ import annotations

from dataclasses import dataclass

from quasar_trt.errors import QuasarError, named_options


@named_options("sampling parameter")
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; every one acts on every verified row.

    temperature: 0 is greedy (ties go to the lowest id).
    top_k: keep the k most probable tokens (ties at the border go to the lower ids); 0 or -1 keeps all.
    top_p: keep the smallest set of most probable tokens whose probability reaches top_p, after top_k.
    seed: any 64-bit integer; None draws one from the system, so unseeded requests differ.
    max_tokens: the most ids to emit, at least 1.
    ignore_eos: go on past the model's end-of-sequence ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    ignore_eos: bool = False

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise QuasarError(f"temperature is {self.temperature}; allowed: 0 (greedy) or more")
        if not isinstance(self.top_k, int) or self.top_k < -1:
            raise QuasarError(f"top_k is {self.top_k}; allowed: a positive integer, or 0 or -1 for all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise QuasarError(f"top_p is {self.top_p}; allowed: above 0, at most 1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise QuasarError(f"seed is {self.seed}; allowed: a 64-bit integer, or None for a fresh one")
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise QuasarError(f"max_tokens is {self.max_tokens}; allowed: an integer of at least 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
