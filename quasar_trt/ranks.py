"""Several ranks as one: rank 0 runs the program and leads, the others open what it opens and take every step that it takes.

Rank 0 tells the others one thing per step: what it accepted of the last one, which sequences it has opened, forked, closed
and truncated since, and the batch. They run the same engine code on the same values, so their caches stay alike.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import quasar_trt
from quasar_trt.communicator import Communicator, ignore_signals, world
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep
from quasar_trt.errors import QuasarError
from quasar_trt.machine import available_memory
from quasar_trt.manifest import Manifest

# Seconds after which a thread that computes in Python gives way to one that wants to go on: a pass waits so before and after each
# of its collectives.
_SWITCH_INTERVAL = 1e-4


@dataclass(frozen=True)
class Open:
    """Every rank opens its part of an engine directory."""

    directory: Path
    engine: str
    threads: int | None

    def here(self, ranks: Communicator) -> tuple[Engine, int]:
        """This rank's part, and the bytes that caches may take on the rank that has least.

        Raises QuasarError on all ranks where one has failed or has another engine in its place.
        """
        from quasar_trt.engines import ENGINES

        engine = problem = identity = None
        try:
            identity = quasar_trt.__version__, _sha256(self.directory / "config.json")
            engine = ENGINES[self.engine](self.directory, Manifest.open(self.directory), self.threads, ranks)
        except Exception as error:
            problem = str(error) if isinstance(error, QuasarError) else repr(error)
        found = ranks.exchange((problem, identity, available_memory()))
        for rank, (problem, _, _) in enumerate(found):
            if problem:
                raise QuasarError(f"rank {rank} on {ranks.hosts[rank]}: {problem}")
        for rank, (_, identity, _) in enumerate(found):
            for what, own, first in zip(("quasar-trt", "engine"), identity, found[0][1], strict=True):
                if own != first:
                    raise QuasarError(
                        f"rank {rank} on {ranks.hosts[rank]} has {what} {own[:16]}, rank 0 on {ranks.hosts[0]} has {first[:16]}; "
                        f"all need the same quasar-trt, and the same files in {self.directory}"
                    )
        engine.join(ranks)
        return engine, min(
            memory // ranks.hosts.count(host) for (_, _, memory), host in zip(found, ranks.hosts, strict=True)
        )


@dataclass(frozen=True)
class Step:
    """One pass of the engine that was opened as number `engine`, after calls of its methods, each with its arguments."""

    engine: int
    calls: Sequence[tuple[str, tuple[int, ...]]]
    batch: Sequence[SequenceStep]


class Leader:
    """Rank 0's side. At the end of the program it tells the others to end too."""

    def __init__(self, ranks: Communicator):
        self.ranks = ranks
        self._num_opened = 0
        self._accepted: list[Acceptance | None] | None = []
        self._apart = False  # while the other ranks are or may be where rank 0 is not
        sys.setswitchinterval(_SWITCH_INTERVAL)
        atexit.register(self._end)

    def open(self, directory: Path, engine: str, threads: int | None) -> Engine:
        """An engine whose passes run on all ranks. Raises QuasarError as `Open.here` does."""
        from quasar_trt.engines.leader import LeaderEngine

        order = Open(directory.resolve(), engine, threads)
        self._tell(order)
        try:
            opened, memory = order.here(self.ranks)
        except QuasarError:
            self.meet()
            raise
        self.meet()
        self._num_opened += 1
        if opened.capabilities.accepts_inside:
            return opened  # whose own ranks follow each other
        return LeaderEngine(opened, self, self._num_opened - 1, memory)

    def begin(self, step: Step) -> None:
        """The other ranks begin this step. `meet` is to follow once their part and this rank's are over."""
        self._tell(step)

    def meet(self, accepted: list[Acceptance | None] | None = None) -> None:
        """All ranks have gone through what was begun. accepted: what comes of the step; None where nothing does."""
        self._apart = False
        self._accepted = accepted

    def _tell(self, order: Open | Step | None) -> None:
        if self._apart:
            raise QuasarError("the other ranks wait in a pass that rank 0 was interrupted in; start the program again")
        self._apart = True
        self.ranks.announce((self._accepted, order))

    def _end(self) -> None:
        if self._apart:
            self.ranks.abort()
        self._tell(None)
        self.ranks.exchange(None)  # nobody leaves MPI while another is still on its way


class _Follower:
    def __init__(self, ranks: Communicator):
        self._ranks = ranks
        self._engines: list[Engine] = []
        self._heard: tuple[list[Acceptance | None] | None, Open | Step | None] | None = None

    def follow(self) -> None:
        """Does what rank 0 tells until it ends."""
        while True:
            order = self._listen()[1]
            self._heard = None
            if order is None:
                self._ranks.exchange(None)
                return
            if isinstance(order, Open):
                try:
                    self._engines.append(order.here(self._ranks)[0])
                except QuasarError:
                    continue  # rank 0 says it
            else:
                self._step(order)

    def _listen(self) -> tuple:
        """What rank 0 says next, kept until it is done."""
        if self._heard is None:
            self._heard = self._ranks.listen()
        return self._heard

    def _step(self, order: Step) -> None:
        engine = self._engines[order.engine]
        for method, arguments in order.calls:
            getattr(engine, method)(*arguments)
        with contextlib.suppress(_Undone):
            engine.step(order.batch, self._accept)

    def _accept(self, index: int, _rows: object) -> Acceptance:
        accepted = self._listen()[0]
        if accepted is None:
            raise _Undone
        return accepted[index]


class _Undone(Exception):
    """Rank 0 has taken the step back."""


@functools.cache
def lead() -> Leader | None:
    """Rank 0's side of this program's ranks; None for a single process.

    Any other rank follows here until rank 0 ends, and leaves with SystemExit: the rest of the program is for rank 0 alone.
    Raises QuasarError as `world` does.
    """
    ranks = world()
    if ranks is None:
        return None
    if ranks.rank == 0:
        return Leader(ranks)
    ignore_signals()
    try:
        _Follower(ranks).follow()
    except Exception as error:
        ranks.fail(str(error) if isinstance(error, QuasarError) else repr(error))
    sys.exit(0)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "none"  # opening the engine says why
