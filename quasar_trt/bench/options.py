"""What the benchmarks run with; light to import, because the command line reads its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass, field

from quasar_trt.errors import QuasarError, named_options
from quasar_trt.sampling_params import SamplingParams

MOST_ROWS = 256  # of a pass


@dataclass(frozen=True)
class PromptOptions:
    """How the prompts of any benchmark are decoded.

    repeats: how often each prompt is decoded in each of the ways that are compared.
    max_tokens, temperature, seed, ignore_eos: as in SamplingParams, for every prompt.
    raw: prompts are encoded as they are, without the chat template.
    threads: of each engine; None lets the engine choose.
    """

    repeats: int = 3
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    raw: bool = False
    threads: int | None = None

    def __post_init__(self):
        if self.repeats < 1:
            raise QuasarError(f"repeats is {self.repeats}; allowed: at least 1")
        _ = self.sampling_params  # what is not allowed is refused before anything runs

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )


@dataclass(frozen=True)
class CellOptions(PromptOptions):
    """What cells of any benchmark do.

    random_prompts: prompts of random ids, drawn by the seed, that come after the given ones as a task of their own.
    """

    random_prompts: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.random_prompts < 0:
            raise QuasarError(f"random_prompts is {self.random_prompts}; allowed: at least 0")


@named_options("bench option")
@dataclass(frozen=True)
class BenchOptions(CellOptions):
    """Options of the four-cell benchmark.

    drafter, drafter_options: those of the drafted cells.
    """

    drafter: str = "suffix"
    drafter_options: dict = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        if self.drafter == "none":
            raise QuasarError("drafter is 'none'; the drafted cells of a benchmark need one")


@named_options("drafter bench option")
@dataclass(frozen=True)
class DrafterBenchOptions(CellOptions):
    """Options of the benchmark of drafters.

    drafters: their names, each once.
    """

    drafters: tuple[str, ...] = ("suffix", "ngram")

    def __post_init__(self):
        super().__post_init__()
        if not self.drafters or len(set(self.drafters)) < len(self.drafters):
            raise QuasarError(f"drafters are '{','.join(self.drafters)}'; allowed: at least one, and each once")


@named_options("requests bench option")
@dataclass(frozen=True)
class RequestsBenchOptions(PromptOptions):
    """Options of the benchmark of many requests at once.

    concurrency: how many requests run at once; kept in order and without repetitions, 1 among them.
    drafter, drafter_options: of the runner.
    """

    max_tokens: int = 96
    concurrency: tuple[int, ...] = (1, 8, 16)
    drafter: str | None = "suffix"
    drafter_options: dict = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        concurrency = tuple(sorted(set(self.concurrency)))
        object.__setattr__(self, "concurrency", concurrency)
        if not concurrency or concurrency[0] != 1:
            raise QuasarError(f"concurrency is {','.join(map(str, concurrency))}; allowed: 1, and larger numbers")


@named_options("kernel bench option")
@dataclass(frozen=True)
class KernelBenchOptions:
    """Options of the benchmark of kernels.

    rows: numbers of rows of a pass; kept in order and without repetitions.
    repeats: times that each number of rows is timed.
    threads: of the linears, the engines and the reading of memory; None takes all usable CPUs.
    """

    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16)
    repeats: int = 10
    threads: int | None = None

    def __post_init__(self):
        rows = tuple(sorted(set(self.rows)))
        object.__setattr__(self, "rows", rows)
        if not rows or rows[0] != 1 or rows[-1] > MOST_ROWS:
            raise QuasarError(f"rows are {','.join(map(str, rows))}; allowed: 1, and others up to {MOST_ROWS}")
        if self.repeats < 1:
            raise QuasarError(f"repeats is {self.repeats}; allowed: at least 1")
