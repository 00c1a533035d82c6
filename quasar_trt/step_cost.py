"""What a pass of an engine costs by its number of rows: measured when a drafted runner opens, refined while it runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep
from quasar_trt.machine import cpu_model, native_build, usable_cpus, version_of
from quasar_trt.manifest import Manifest
from quasar_trt.user_cache import cache_path, read_cache, write_cache

_ROUNDS = 4  # times that each number of rows is measured; the fastest counts
_SECONDS = 0.5  # no measurement begins later than this, except the first two of those that the others are inferred from
_NEEDED = (1, 2, 3, 5, 9, 17)  # rows
_BEYOND = (24, 32, 48, 64)  # rows; a pass of more is taken to go on growing at the same rate

# While running, an observed pass moves the level of all costs by this share of its deviation, and its own entry by a
# smaller one; a deviation beyond the bound counts as the bound, so that a pass that was interrupted moves little.
_LEVEL_RATE, _ENTRY_RATE, _LARGEST_DEVIATION = 0.1, 0.05, 0.5


class StepCost:
    """Seconds of a pass by its rows.

    The costs of different numbers of rows are compared with each other, and with those of another engine only where `compare`
    has set the levels of both. The level, which all of them share,
    follows what is observed quickly: a longer context or a busy machine raises them alike. Their ratios follow slowly.
    """

    def __init__(self, measured: Mapping[int, float]):
        """measured: rows -> seconds, of 1 row and some other numbers. Between them the cost is linear; behind the last it
        goes on as between the last two. More rows never cost less: a disturbance only ever adds to a time."""
        points = sorted(measured.items())
        for index in range(len(points) - 2, -1, -1):
            points[index] = points[index][0], min(points[index][1], points[index + 1][1])
        self._seconds = [0.0]  # [rows]
        self._last_slope = 0.0
        for (rows, seconds), (more_rows, more_seconds) in pairwise(points):
            self._last_slope = (more_seconds - seconds) / (more_rows - rows)
            self._seconds += [seconds + self._last_slope * more for more in range(more_rows - rows)]
        self._seconds.append(points[-1][1])
        self.level = 1.0

    def seconds(self, rows: int) -> float:
        """rows: 1 or more."""
        table = self._seconds
        if rows < len(table):
            return self.level * table[rows]
        return self.level * (table[-1] + self._last_slope * (rows - len(table) + 1))

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long; passes of more rows than were measured teach nothing."""
        if rows >= len(self._seconds) or seconds <= 0:
            return
        deviation = bounded_deviation(seconds, self.seconds(rows), _LARGEST_DEVIATION)
        self.level *= math.exp(_LEVEL_RATE * deviation)
        self._seconds[rows] *= math.exp(_ENTRY_RATE * deviation)

    @classmethod
    def open(cls, engine: Engine, max_draft_len: int, names: Sequence[object]) -> StepCost:
        """The costs measured earlier under the same `names`, else those measured now and kept for the next time.

        names: all that the costs depend on. They are kept in the user's cache directory; where it cannot be read or
        written or holds something else, or while the machine is too busy to measure anything, they are measured each time.
        """
        path = _cache_path(names)
        measured = _read(path)
        if measured is None:
            measured, steady = measure(engine, max_draft_len)
            if steady:
                write_cache(path, json.dumps(measured).encode())
        return cls(measured)


def compare(run: Callable[[], None], other: Callable[[], None]) -> float:
    """Seconds that `run` takes over those that `other` takes: of each the fastest of several that alternate, because what was
    measured at different times cannot be compared."""
    fastest = [math.inf, math.inf]
    for _ in range(_ROUNDS):
        for index, each in enumerate((run, other)):
            began = perf_counter()
            each()
            fastest[index] = min(fastest[index], perf_counter() - began)
    return fastest[0] / fastest[1]


@contextmanager
def one_row(engine: Engine) -> Iterator[Callable[[], None]]:
    """What makes a pass of one row of an engine."""
    sequence = engine.open()

    def run() -> None:
        engine.step([SequenceStep(sequence, [0])], _accept_nothing)
        engine.truncate(sequence, 0)

    try:
        yield run
    finally:
        engine.close(sequence)


def open_step_cost(engine: Engine, manifest: Manifest) -> StepCost:
    """The costs of the passes of an engine directory's engine; they depend on the engine, the program and the machine."""
    names = [
        *sorted(record.header_sha256 for record in manifest.files.values()),
        type(engine).__name__,
        getattr(engine, "threads", None),  # of engines that have them
        getattr(engine, "isa", None),
        getattr(engine, "hosts", None),
        version_of("quasar-trt"),
        native_build(),
        engine.device or (cpu_model(), usable_cpus()),
        manifest.limits.max_draft_len,
    ]
    return StepCost.open(engine, manifest.limits.max_draft_len, names)


def bounded_deviation(found: float, expected: float, largest: float) -> float:
    """log(found / expected), held within -largest and largest; nothing found counts as a nanosecond."""
    return max(-largest, min(largest, math.log(max(found, 1e-9) / expected)))


def measure(engine: Engine, max_draft_len: int) -> tuple[dict[int, float], bool]:
    """Rows -> seconds of the fastest of several passes of an empty sequence with so many rows, all of which are scored;
    and whether they are steady: of most numbers of rows the two fastest passes differ by less than a tenth.

    Up to max_draft_len + 1 rows one by one, and some beyond, as far as the engine's limits allow. The passes of different
    numbers of rows alternate, so that a disturbance does not meet one of them alone. A slow engine is measured less often,
    and at fewer numbers of rows.
    """
    reachable = (*range(1, max_draft_len + 2), *_NEEDED, *_BEYOND)
    wanted = {rows for rows in reachable if rows <= engine.max_verify_rows}
    times: dict[int, list[float]] = {rows: [] for rows in wanted}
    sequence = engine.open()
    try:
        deadline = perf_counter() + _SECONDS
        for _ in range(_ROUNDS):
            for rows in sorted(wanted, key=lambda rows: (rows not in _NEEDED, rows)):
                began = perf_counter()
                if began > deadline and (rows not in _NEEDED or len(times[rows]) >= 2):
                    continue
                engine.step([SequenceStep(sequence, [0], Draft((0,) * (rows - 1)))], _accept_nothing)
                times[rows].append(perf_counter() - began)
                engine.truncate(sequence, 0)
    finally:
        engine.close(sequence)
    fastest = {rows: sorted(seconds) for rows, seconds in times.items() if seconds}
    repeated = [seconds for seconds in fastest.values() if len(seconds) > 1]
    num_steady = sum(second < 1.1 * first for first, second, *_ in repeated)
    return {rows: seconds[0] for rows, seconds in fastest.items()}, 2 * num_steady > len(repeated)


def _accept_nothing(_index: int, _logits: object) -> Acceptance:
    return Acceptance((0,), 0)


def _cache_path(names: Sequence[object]) -> Path:
    key = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    return cache_path("step-cost", f"{key}.json")


def _read(path: Path) -> dict[int, float] | None:
    """None unless the file holds such costs."""
    try:
        stored = json.loads(read_cache(path) or b"null")
        measured = {int(rows): float(seconds) for rows, seconds in stored.items()}
    except (ValueError, TypeError, AttributeError):
        return None
    fits = min(measured, default=0) == 1 and all(0 < seconds < math.inf for seconds in measured.values())
    return measured if fits else None
