"""What the ranks of a program say to each other through MPI, and who notices that one of them has stopped answering.

The only module that touches mpi4py. Rank 0 announces, the others listen; within a pass of an engine all ranks call the
same collectives on numpy arrays. Between passes a listening rank sleeps.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from quasar_trt.errors import QuasarError

PATIENCE = 60  # seconds that a rank waits for the others within a pass or while they open an engine
_TICK = 1.0  # seconds; a process that is stopped does not count them
_ROLL_CALL = 3.0  # seconds to answer, once patience is over; the ranks begin to wait within about a tick of each other
_FIRST_BYTES = 4000  # of an announcement, length included; small enough to be sent without waiting for a receiver
_SPIN = 0.0005  # seconds that a listener spins; then it sleeps for a share of what it has waited
_SLEEP_SHARE, _LONGEST_SLEEP = 0.05, 0.01

# Variables in which launchers (Open MPI's; MPICH's and Intel MPI's) tell a process the number of ranks.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Communicator:
    """All ranks of the program; one per process, from `world`.

    rank, size: of this process, and how many there are.
    hosts: name of each rank's machine.
    num_sharing: ranks, this one included, that may run on the same CPUs of the same machine.
    comm: the mpi4py communicator, for an engine that has collectives of its own.
    collectives: name -> callable on a numpy array that every rank calls alike, written in C, so that signals are answered
        after a pass and not within:
        largest, add: in place, elementwise over ranks. gather: in place, array [size, n] of which each rank has filled its own
        row. collect: the same on rank 0; the others give their row alone.
    """

    def __init__(self, mpi):
        """mpi: the module mpi4py.MPI. Raises QuasarError where MPI does not allow calls from several threads at once."""
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise QuasarError(
                "MPI was initialized for a single thread; quasar-trt needs mpi4py.rc.thread_level = 'multiple', its default"
            )
        self.comm = mpi.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.collectives = {
            "largest": functools.partial(self.comm.Allreduce, mpi.IN_PLACE, op=mpi.MAX),
            "add": functools.partial(self.comm.Allreduce, mpi.IN_PLACE, op=mpi.SUM),
            "gather": functools.partial(self.comm.Allgather, mpi.IN_PLACE),
            "collect": functools.partial(self.comm.Gather, mpi.IN_PLACE)
            if self.rank == 0
            else functools.partial(self.comm.Gather, recvbuf=None),
        }
        self._mpi = mpi
        self._sent: list[tuple[object, object]] = []  # requests of the last announcement, and their buffers
        self._roll = mpi.COMM_WORLD.Dup()
        self._progress = 0  # of the collectives below
        self._watched: list[Callable[[], int]] = [lambda: self._progress]
        self._launcher = os.getppid()
        # Without a limit: rank 0 may have other things to do first.
        places = self.comm.allgather((mpi.Get_processor_name(), _affinity()))
        host, cpus = places[self.rank]
        self.hosts = [name for name, _ in places]
        self.num_sharing = sum(name == host and bool(cpus & others) for name, others in places)
        threading.Thread(target=self._watch, name="quasar-trt ranks", daemon=True).start()

    def announce(self, message: object) -> None:
        """Rank 0 tells all others; they get it from `listen`. Does not wait for them."""
        for request, _ in self._sent:
            request.Wait()
        data = pickle.dumps(message)
        data = len(data).to_bytes(8, "little") + data
        first = bytearray(data[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"))
        parts = [first, bytearray(data[_FIRST_BYTES:])] if len(data) > _FIRST_BYTES else [first]
        self._sent = [(self.comm.Ibcast([part, self._mpi.BYTE]), part) for part in parts]

    def listen(self) -> object:
        """The next announcement. Sleeps until it comes, without a limit: rank 0 may have nothing to do."""
        first = bytearray(_FIRST_BYTES)
        self._receive(first)
        size = int.from_bytes(first[:8], "little") + 8
        rest = bytearray(max(size - _FIRST_BYTES, 0))
        if rest:
            self._receive(rest)
        return pickle.loads((first + rest)[8:size])

    def _receive(self, buffer: bytearray) -> None:
        request = self.comm.Ibcast([buffer, self._mpi.BYTE])
        began = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - began
            if waited < _SPIN:
                os.sched_yield()
            else:
                time.sleep(min(waited * _SLEEP_SHARE, _LONGEST_SLEEP))

    def exchange(self, value: object) -> list:
        """Every rank brings a value; returns those of all, by rank."""
        self._progress += 1
        try:
            return self.comm.allgather(value)
        finally:
            self._progress += 1

    def watch(self, progress: Callable[[], int]) -> None:
        """Ends the program where `progress()`, called from another thread, stays at the same odd number for `PATIENCE`
        seconds: an engine counts its collectives so, when they begin and when they end."""
        self._watched.append(progress)

    def fail(self, cause: str) -> NoReturn:
        """Ends all ranks, with one line on stderr."""
        print(f"error: rank {self.rank} on {self.hosts[self.rank]}: {cause}", file=sys.stderr, flush=True)
        time.sleep(0.2)  # so that what the launcher says comes behind
        self.abort()

    def abort(self) -> NoReturn:
        """Ends all ranks at once."""
        self._mpi.COMM_WORLD.Abort(1)
        os._exit(1)

    def _watch(self) -> None:
        seen: dict[Callable[[], int], tuple[int, int]] = {}
        while True:
            time.sleep(_TICK)
            if os.getppid() != self._launcher:  # it was killed and cannot end its ranks
                os._exit(1)
            for progress in list(self._watched):
                count, (last, ticks) = progress(), seen.get(progress, (0, 0))
                ticks = ticks + 1 if count == last and count % 2 else 0
                seen[progress] = count, ticks
                if ticks * _TICK >= PATIENCE:
                    self._call_roll()

    def _call_roll(self) -> NoReturn:
        """Finds out who waits too, and has the first of them name those that do not."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [self._roll.isend(None, rank) for rank in others]
        time.sleep(_ROLL_CALL)
        present = [self.rank, *(rank for rank in others if self._roll.iprobe(rank))]
        absent = [str(rank) for rank in others if rank not in present]
        if self.rank == min(present):
            who = f"no answer from rank {', '.join(absent)}" if absent else "all ranks wait for each other"
            self.fail(f"{who} for {PATIENCE} s; ended all ranks")
        time.sleep(_ROLL_CALL)
        del sent
        self.abort()


def _affinity() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset({0})


def launched_size() -> int:
    """Ranks that a launcher such as mpirun has started this program on, itself included."""
    sizes = [int(os.environ[name]) for name in _SIZES if name in os.environ]
    return max(sizes, default=1)


@functools.cache
def world() -> Communicator | None:
    """The ranks of this program; None for a single process, for which MPI is not even loaded.

    Raises QuasarError where several were launched and MPI cannot be used.
    """
    if launched_size() == 1:
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise QuasarError(
            f"this program was launched on {launched_size()} ranks, and MPI cannot be used: {error}; pip install 'quasar-trt[mpi]'"
        ) from None
    return Communicator(MPI)


def ignore_signals() -> None:
    """Of a rank that follows: rank 0 answers signals and tells it to end; where rank 0 cannot, the launcher kills it."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
