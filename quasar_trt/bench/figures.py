"""Figures as text, and the interval of a mean ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from quasar_trt.drafters.registry import keeps_ids
from quasar_trt.tables import Alarm

_RESAMPLES = 10_000


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def median(values: Sequence[float], spec: str = ".2f", unit: str = "x") -> str:
    return f"{statistics.median(values):{spec}}{unit}" if values else "-"


def spread(values: Sequence[float], spec: str = ".2f", unit: str = "x") -> str:
    """Median, with (min..max) when there is more than one."""
    middle = median(values, spec, unit)
    return middle if len(values) < 2 else f"{middle} ({min(values):{spec}}..{max(values):{spec}})"


def same_ids(equal: int, total: int, drafter: str | None, temperature: float) -> str:
    """Of how many runs the ids are those of others; fewer than all stand out where such a drafter keeps ids."""
    shown = f"{equal}/{total}"
    return shown if equal == total or not keeps_ids(drafter, temperature) else Alarm(shown)


def count(many: int, noun: str) -> str:
    return f"{many} {noun}{'' if many == 1 else 's'}"


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the geometric mean of positive ratios; None for fewer than two.

    The percentile bootstrap (Efron, 1979): the ratios are drawn again 10000 times, with a fixed seed.
    """
    if len(ratios) < 2:
        return None
    logs = np.log(np.asarray(ratios))
    draws = np.random.default_rng(0).integers(len(logs), size=(_RESAMPLES, len(logs)))
    low, high = np.exp(np.quantile(logs[draws].mean(axis=1), (0.025, 0.975)))
    return float(low), float(high)
