"""The figures of the benchmark of many requests at once."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quasar_trt.bench.figures import count, same_ids, spread
from quasar_trt.bench.options import RequestsBenchOptions
from quasar_trt.machine import describe_machine
from quasar_trt.tables import FigureTable


@dataclass(frozen=True)
class Batch:
    """All prompts, decoded with at most `concurrency` of them at once.

    token_ids: of each prompt. seconds: from the first prompt's beginning to the last one's end.
    """

    concurrency: int
    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    mean_acceptance_length: float

    @property
    def speed(self) -> float:
        """tokens/s, the time of the prompts included."""
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass(frozen=True)
class LongPrompt:
    """Seconds of each step of `num_decoding` requests: undisturbed, and while a prompt of `num_tokens` entered beside them."""

    num_tokens: int
    num_decoding: int
    undisturbed: tuple[float, ...]
    disturbed: tuple[float, ...]

    @property
    def median_over_undisturbed(self) -> float:
        return statistics.median(self.disturbed) / statistics.median(self.undisturbed)

    @property
    def p99_over_median(self) -> float:
        """Both while the prompt entered."""
        return float(np.quantile(self.disturbed, 0.99)) / statistics.median(self.disturbed)


@dataclass(frozen=True)
class RequestsReport:
    """batches: repeat by repeat, every concurrency in turn."""

    options: RequestsBenchOptions
    engine_dir: Path
    num_prompts: int
    batches: tuple[Batch, ...]
    long_prompts: tuple[LongPrompt, ...]

    def of(self, concurrency: int) -> list[Batch]:
        """One per repeat."""
        return [batch for batch in self.batches if batch.concurrency == concurrency]

    def speedups(self, concurrency: int) -> list[float]:
        """tokens/s over those of one request at a time, one ratio per repeat."""
        return [batch.speed / alone.speed for batch, alone in zip(self.of(concurrency), self.of(1), strict=True)]

    def identical(self, concurrency: int) -> tuple[int, int]:
        """(requests whose ids are those of the request alone, all)."""
        pairs = [
            (ids, alone)
            for batch in self.of(concurrency)
            for ids, alone in zip(batch.token_ids, self.batches[0].token_ids, strict=True)
        ]
        return sum(ids == alone for ids, alone in pairs), len(pairs)

    def to_dict(self) -> dict:
        return {
            "definition": "tokens/s = emitted tokens / seconds, prompts included; speed-up = median over the repeats of the ratio to one request at a time",
            "environment": describe_machine(),
            "options": dataclasses.asdict(self.options),
            "engine": str(self.engine_dir),
            "concurrency": {
                number: {
                    "tokens_per_second": [batch.speed for batch in self.of(number)],
                    "speedups": self.speedups(number),
                    "identical_to_alone": self.identical(number),
                }
                for number in self.options.concurrency
            },
            "batches": [dataclasses.asdict(batch) for batch in self.batches],
            "long_prompts": [
                dataclasses.asdict(each)
                | {"median_over_undisturbed": each.median_over_undisturbed, "p99_over_median": each.p99_over_median}
                for each in self.long_prompts
            ],
        }

    def tables(self) -> list[FigureTable]:
        return [self._throughput(), self._long_prompt()]

    def summary(self) -> str:
        options = self.options
        return (
            f"{count(self.num_prompts, 'prompt')}, {count(options.repeats, 'repeat')}, up to {options.max_tokens} tokens, "
            f"temperature {options.temperature:g}, end of sequence {'ignored' if options.ignore_eos else 'respected'}, "
            f"drafter {options.drafter or 'none'}. tokens/s includes prompts; ratios are medians over the repeats (min..max)."
        )

    def _throughput(self) -> FigureTable:
        rows = []
        for number in self.options.concurrency:
            batches = self.of(number)
            rows.append(
                (
                    str(number),
                    f"{statistics.median(batch.speed for batch in batches):.1f}",
                    "1.00x" if number == 1 else spread(self.speedups(number)),
                    f"{statistics.fmean(batch.mean_acceptance_length for batch in batches):.2f}",
                    same_ids(*self.identical(number), self.options.drafter, self.options.temperature),
                )
            )
        headings = ("requests\nat once", "tokens/s", "over one\nat a time", "mean\nacceptance\nlength", "ids as\nalone")
        return FigureTable("throughput", headings, rows)

    def _long_prompt(self) -> FigureTable:
        first = self.long_prompts[0]
        row = (
            str(first.num_tokens),
            spread([each.median_over_undisturbed for each in self.long_prompts]),
            spread([each.p99_over_median for each in self.long_prompts]),
            spread([1e3 * max(each.disturbed) for each in self.long_prompts], ".0f", " ms"),
        )
        headings = ("prompt tokens", "median step\nover undisturbed", "p99 step\nover median", "longest step")
        return FigureTable(f"steps of {first.num_decoding} requests while a prompt enters", headings, [row])
