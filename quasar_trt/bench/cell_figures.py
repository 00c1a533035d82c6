"""Runs of a benchmark's cells, and the figures that every such benchmark derives from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from quasar_trt.bench.cell import Measurement
from quasar_trt.bench.figures import count, ratio_interval
from quasar_trt.bench.options import CellOptions


@dataclass(frozen=True)
class Run:
    """One measurement and where it belongs; `prompt` is the prompt's index."""

    cell: object
    task: str
    prompt: int
    repeat: int
    num_prompt_tokens: int
    measurement: Measurement

    def to_dict(self) -> dict:
        return {
            "cell": self.cell.name,
            "task": self.task,
            "prompt": self.prompt,
            "repeat": self.repeat,
            "num_prompt_tokens": self.num_prompt_tokens,
        } | asdict(self.measurement)


class CellFigures:
    """A figure that was not measured is None.

    baseline: the cell that speed-ups are over.
    """

    options: CellOptions
    runs: tuple[Run, ...]
    baseline: object

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(run.task for run in self.runs))

    def select(self, cell, task: str | None = None) -> list[Run]:
        return [run for run in self.runs if run.cell == cell and task in (None, run.task)]

    def speed(self, cell, task: str | None = None) -> float | None:
        """tokens/s over all repeats."""
        return _speed(self.select(cell, task))

    def speeds(self, cell, task: str | None = None) -> list[float | None]:
        """tokens/s, one per repeat; None where no token was timed."""
        runs = self.select(cell, task)
        return [_speed([run for run in runs if run.repeat == repeat]) for repeat in range(self.options.repeats)]

    def speedups(self, cell, task: str | None = None) -> list[float]:
        """Speed-up over the baseline, one per repeat."""
        pairs = zip(self.speeds(cell, task), self.speeds(self.baseline, task), strict=True)
        return [own / base for own, base in pairs if own and base]

    def mean_speedup_of_tasks(self, cell) -> float | None:
        """The mean over the tasks of each one's median speed-up; None where a task has none."""
        by_task = [self.speedups(cell, task) for task in self.tasks]
        return statistics.fmean(map(statistics.median, by_task)) if all(by_task) else None

    def gains(self, cell, plain, task: str | None = None) -> list[float]:
        """tokens/s of one cell over another, one ratio per prompt: the geometric mean over its repeats, each of which is
        paired. Prompts of which no token was timed are left out."""
        bases = {(run.prompt, run.repeat): _speed([run]) for run in self.select(plain, task)}
        by_prompt: dict[int, list[float]] = {}
        for run in self.select(cell, task):
            own, base = _speed([run]), bases[run.prompt, run.repeat]
            if own and base:
                by_prompt.setdefault(run.prompt, []).append(own / base)
        return [statistics.geometric_mean(ratios) for ratios in by_prompt.values()]

    def mean_acceptance_length(self, cell, task: str | None = None) -> float:
        """Emitted tokens / verify steps."""
        runs = [run.measurement for run in self.select(cell, task)]
        return sum(len(run.token_ids) for run in runs) / sum(run.num_verify_steps for run in runs)

    def identical_to(self, plain, cell) -> tuple[int, int]:
        """(runs of a cell whose ids equal those of another cell, all of its runs)."""
        ids = {(run.prompt, run.repeat): run.measurement.token_ids for run in self.select(plain)}
        equal = [run.measurement.token_ids == ids[run.prompt, run.repeat] for run in self.select(cell)]
        return sum(equal), len(equal)

    def shares(self, cell, task: str | None = None) -> dict[str, float]:
        """Parts of the measured time spent in draft, verify and accept."""
        totals = {"draft": 0.0, "verify": 0.0, "accept": 0.0}
        for run in self.select(cell, task):
            for part, seconds in run.measurement.seconds.items():
                totals[part] += seconds
        whole = sum(totals.values())
        return {part: seconds / whole for part, seconds in totals.items()}

    def figures(self, cell, task: str | None = None) -> dict:
        """What JSON holds of a cell."""
        ratios = self.speedups(cell, task)
        return {
            "tokens_per_second": self.speed(cell, task),
            "tokens_per_second_by_repeat": self.speeds(cell, task),
            "speedup": statistics.median(ratios) if ratios else None,
            "speedups": ratios,
            "mean_acceptance_length": self.mean_acceptance_length(cell, task),
            "time_shares": self.shares(cell, task),
        }

    def conditions(self) -> str:
        """What was run, for a summary."""
        options, prompts = self.options, len({run.prompt for run in self.runs})
        return (
            f"{count(prompts, 'prompt')}, {count(options.repeats, 'repeat')}, up to {options.max_tokens} tokens, temperature "
            f"{options.temperature:g}, end of sequence {'ignored' if options.ignore_eos else 'respected'}"
        )


def gain_figures(gains: Sequence[float]) -> dict:
    """What JSON holds of the gains of some prompts."""
    return {
        "prompts": list(gains),
        "geometric_mean": statistics.geometric_mean(gains) if gains else None,
        "interval_95": ratio_interval(gains),
    }


def _speed(runs: Sequence[Run]) -> float | None:
    seconds = sum(run.measurement.decode_seconds for run in runs)
    return sum(run.measurement.decode_tokens for run in runs) / seconds if seconds > 0 else None
