"""What a benchmark runs with; light to import, because the command line reads its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass, field

from quasar_trt.errors import QuasarError, named_options
from quasar_trt.sampling_params import SamplingParams


@named_options("bench option")
@dataclass(frozen=True)
class BenchOptions:
    """Options of one benchmark.

    drafter, drafter_options: those of the drafted cells.
    repeats: how often each prompt is decoded by each cell.
    max_tokens, temperature, seed, ignore_eos: as in SamplingParams, for every prompt.
    raw: prompts are encoded as they are, without the chat template.
    threads: of each cell's engine; None lets the engine choose.
    """

    drafter: str = "suffix"
    drafter_options: dict = field(default_factory=dict)
    repeats: int = 3
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    raw: bool = False
    threads: int | None = None

    def __post_init__(self):
        if self.drafter == "none":
            raise QuasarError("drafter is 'none'; the drafted cells of a benchmark need one")
        if self.repeats < 1:
            raise QuasarError(f"repeats is {self.repeats}; allowed: at least 1")

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )
