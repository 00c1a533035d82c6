"""The figures of the benchmark of drafters, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from quasar_trt.bench.cell_figures import CellFigures, Run, gain_figures
from quasar_trt.bench.figures import median, number, same_ids, spread
from quasar_trt.bench.options import DrafterBenchOptions
from quasar_trt.machine import describe_machine
from quasar_trt.tables import FigureTable

_SHOWN_POSITIONS = 8


@dataclass(frozen=True)
class Contender:
    """A drafter by its name, or None for plain decoding."""

    drafter: str | None

    @property
    def name(self) -> str:
        """What it drafts with is cut to the end of its path."""
        kind, colon, operand = (self.drafter or "plain").partition(":")
        return f"{kind}{colon}{Path(operand).name}"


@dataclass(frozen=True)
class DrafterReport(CellFigures):
    """All runs of one benchmark; the methods derive every figure from them.

    contenders: plain decoding, then the drafters.
    """

    options: DrafterBenchOptions
    engine_dir: Path
    contenders: tuple[Contender, ...]
    runs: tuple[Run, ...]
    peak_memory: dict[Contender, int]

    @property
    def baseline(self) -> Contender:
        return self.contenders[0]

    def drafting(self, contender: Contender) -> dict:
        """Drafts per verify step, draft tokens per draft, accepted tokens per draft token, and for each place in a draft the
        share of all drafts of which the token there was accepted. None where nothing was drafted."""
        runs = [run.measurement for run in self.select(contender)]
        num_drafts, num_tokens = sum(run.num_drafts for run in runs), sum(run.num_draft_tokens for run in runs)
        accepted = [sum(counts) for counts in zip_longest(*(r.num_accepted_tokens_per_pos for r in runs), fillvalue=0)]
        return {
            "drafts_per_step": num_drafts / sum(run.num_verify_steps for run in runs),
            "tokens_per_draft": num_tokens / num_drafts if num_drafts else None,
            "acceptance_rate": sum(accepted) / num_tokens if num_tokens else None,
            "acceptance_by_position": [count / num_drafts for count in accepted],
        }

    def to_dict(self) -> dict:
        """Everything as JSON: environment, options, figures per drafter and task, and every single run."""
        return {
            "definition": "tokens/s = decode tokens / decode seconds, prefill excluded; speed-up = median over the repeats of the ratio to plain decoding; gain = the same per prompt, with the 95 % bootstrap interval of its geometric mean over the prompts; acceptance by position = accepted tokens at that place of a draft / drafts",
            "environment": describe_machine(),
            "options": dataclasses.asdict(self.options),
            "engine": str(self.engine_dir),
            "drafters": {
                contender.drafter or "plain": self.figures(contender)
                | self.drafting(contender)
                | {
                    "peak_memory_bytes": self.peak_memory[contender],
                    "identical_to_plain": self.identical_to(self.baseline, contender),
                    "gain": gain_figures(self.gains(contender, self.baseline)),
                    "tasks": {task: self.figures(contender, task) for task in self.tasks},
                }
                for contender in self.contenders
            },
            "runs": [run.to_dict() for run in self.runs],
        }

    def tables(self) -> list[FigureTable]:
        by_task = [self._by_task()] if len(self.tasks) > 1 else []
        return [self._speeds(), *by_task, self._drafts(), self._positions()]

    def summary(self) -> str:
        return (
            f"{self.conditions()}. tokens/s excludes prefill; speed-up is the median over the repeats (min..max) of the ratio "
            "to plain decoding."
        )

    def _speeds(self) -> FigureTable:
        rows = []
        for contender in self.contenders:
            gains = self.gains(contender, self.baseline)
            identical = self.identical_to(self.baseline, contender)
            rows.append(
                (
                    contender.name,
                    number(self.speed(contender), ".1f"),
                    *(("1.00x", "", "") if contender == self.baseline else self._gains(contender, gains)),
                    f"{self.peak_memory[contender] / 1e6:,.0f} MB",
                    same_ids(*identical, contender.drafter, self.options.temperature),
                )
            )
        headings = (
            "drafter",
            "tokens/s",
            "speed-up",
            "mean of\nprompts",
            "lowest\nprompt",
            "peak\nmemory",
            "ids as\nplain",
        )
        return FigureTable("drafters", headings, rows)

    def _gains(self, contender: Contender, gains: list[float]) -> tuple[str, str, str]:
        mean = f"{statistics.geometric_mean(gains):.2f}x" if gains else "-"
        return spread(self.speedups(contender)), mean, f"{min(gains):.2f}x" if gains else "-"

    def _by_task(self) -> FigureTable:
        drafters = self.contenders[1:]
        rows = [
            (task, number(self.speed(self.baseline, task), ".1f"), *(median(self.speedups(d, task)) for d in drafters))
            for task in self.tasks
        ]
        means = [self.mean_speedup_of_tasks(drafter) for drafter in drafters]
        rows.append(("mean of the tasks", "", *("-" if mean is None else f"{mean:.2f}x" for mean in means)))
        names = [drafter.name.replace(":", ":\n") for drafter in drafters]
        return FigureTable("by task: speed-up over plain", ("task", "plain\ntokens/s", *names), rows)

    def _drafts(self) -> FigureTable:
        rows = []
        for drafter in self.contenders[1:]:
            drafting, shares = self.drafting(drafter), self.shares(drafter)
            rows.append(
                (
                    drafter.name,
                    f"{self.mean_acceptance_length(drafter):.2f}",
                    f"{drafting['drafts_per_step']:.2f}",
                    number(drafting["tokens_per_draft"], ".1f"),
                    number(drafting["acceptance_rate"], ".1%"),
                    *(f"{shares[part]:.1%}" for part in ("draft", "verify", "accept")),
                )
            )
        headings = (
            "drafter",
            "mean\nacceptance\nlength",
            "drafts\nper step",
            "tokens\nper draft",
            "accepted",
            "draft",
            "verify",
            "accept",
        )
        return FigureTable("drafts, and where the time goes", headings, rows)

    def _positions(self) -> FigureTable:
        rows = []
        for drafter in self.contenders[1:]:
            shares = self.drafting(drafter)["acceptance_by_position"][:_SHOWN_POSITIONS]
            rows.append(
                (drafter.name, *(f"{share:.0%}" for share in shares), *["-"] * (_SHOWN_POSITIONS - len(shares)))
            )
        headings = ("drafter", *map(str, range(1, _SHOWN_POSITIONS + 1)))
        note = "share of the drafts whose token at that place was accepted"
        return FigureTable("acceptance by position", headings, rows, note)
