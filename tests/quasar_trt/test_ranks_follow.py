"""Rank 0 leads, another follows: their caches stay alike whatever rank 0's program does. Without MPI: two threads and a queue."""

from __future__ import annotations

import atexit
import pickle
import queue
import threading
from pathlib import Path

import pytest
from stubs import StubDrafter, StubEngine, perfect_rule, random_logits

from quasar_trt import communicator, ranks
from quasar_trt.drafters.base import Draft
from quasar_trt.engines import ENGINES
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.errors import QuasarError
from quasar_trt.ranks import Leader, _Follower
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VOCAB = 40


class Wire:
    """Between two ranks; announcements are copied, as MPI copies them."""

    def __init__(self):
        self.announced: queue.Queue[bytes] = queue.Queue()
        self.barrier = threading.Barrier(2, timeout=20)
        self.values = [None, None]


class Failed(Exception):
    pass


class Ranks:
    """A `Communicator` of one of two threads."""

    size = 2
    hosts = ("first", "second")

    def __init__(self, wire: Wire, rank: int):
        self.rank = rank
        self._wire = wire

    def announce(self, message: object) -> None:
        self._wire.announced.put(pickle.dumps(message))

    def listen(self) -> object:
        return pickle.loads(self._wire.announced.get(timeout=20))

    def exchange(self, value: object) -> list:
        self._wire.values[self.rank] = value
        self._wire.barrier.wait()
        values = list(self._wire.values)
        self._wire.barrier.wait()
        return values

    def fail(self, cause: str) -> None:
        raise Failed(cause)


class Pair:
    """A leader, and a follower in a thread of its own.

    opened: the engines of each rank, in order. engines: the last one of each.
    """

    def __init__(self):
        self.opened: tuple[list[StubEngine], list[StubEngine]] = [], []
        wire = Wire()
        self.leader = Leader(Ranks(wire, 0))
        atexit.unregister(self.leader._end)
        self._thread = threading.Thread(target=_Follower(Ranks(wire, 1)).follow)
        self._thread.start()

    @property
    def engines(self) -> list[StubEngine]:
        return [engines[-1] for engines in self.opened]

    def open(self):
        return self.leader.open(Path("engine"), "stub", None)

    def open_here(self, directory, manifest, threads, ranks) -> StubEngine:
        self.opened[ranks.rank].append(stub())
        return self.opened[ranks.rank][-1]

    def end(self) -> None:
        if self._thread.is_alive():
            self.leader._end()
            self._thread.join(timeout=20)
            assert not self._thread.is_alive()


def stub() -> StubEngine:
    return StubEngine(random_logits(VOCAB), VOCAB, page_size=4, memory=400)


@pytest.fixture
def pair(monkeypatch):
    pair = Pair()
    monkeypatch.setitem(ENGINES, "stub", pair.open_here)
    monkeypatch.setattr(ranks.Manifest, "open", lambda directory: None)
    yield pair
    pair.end()


def assert_alike(engines: list[StubEngine]) -> None:
    first, second = engines
    assert first.caches == second.caches and first.closed == second.closed
    assert first.passes == second.passes and first.accepted == second.accepted


def accept_none(*_) -> Acceptance:
    return Acceptance((0,), 0)


def test_a_follower_takes_every_step_and_ends_with_the_same_caches(pair):
    engine = pair.open()
    prompts = [list(range(count)) + [3, 4, 5] * 2 for count in (2, 9, 17, 30)]
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=20)
    outputs = []
    for each in (engine, stub()):
        drafter = StubDrafter(perfect_rule(random_logits(VOCAB)), 4)
        runner = Runner(each, drafter=drafter, kv_cache_memory_bytes=120)
        outputs.append([[o.token_ids for o in output.outputs] for output in runner.generate(prompts, params)])
        assert runner.service.num_preemptions > 0
        runner.reset_prefix_cache()
    assert outputs[0] == outputs[1]
    engine.step([SequenceStep(engine.open(), [1])], accept_none)  # brings what was closed
    pair.end()
    assert_alike(pair.engines)
    assert len(pair.engines[0].passes) > 10


def test_what_is_accepted_of_a_step_reaches_a_follower_with_the_next_one(pair):
    engine = pair.open()
    one, other = engine.open(), engine.open()
    batch = [SequenceStep(one, [1], Draft((2, 3, 4))), SequenceStep(other, [5, 6], Draft((7,)))]
    kept = [Acceptance((2, 3, 9), 2), Acceptance((0,), 0)]
    assert engine.step(batch, lambda index, rows: kept[index]) == kept
    engine.step([SequenceStep(one, [9, 8], needs_logits=False)], accept_none)
    pair.end()
    assert_alike(pair.engines)
    assert pair.engines[1].caches == {one: [1, 2, 3, 9, 8], other: [5, 6]}


def test_a_step_that_rank_0_takes_back_is_taken_back_everywhere(pair):
    engine = pair.open()
    one = engine.open()
    engine.step([SequenceStep(one, [1, 2])], accept_none)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.step([SequenceStep(one, [3], Draft((4, 5)))], interrupt)
    engine.truncate(one, 2)  # as the scheduler does
    engine.step([SequenceStep(one, [6])], accept_none)
    pair.end()
    assert pair.engines[0].caches == pair.engines[1].caches == {one: [1, 2, 6]}


def test_what_an_engine_refuses_reaches_nobody(pair):
    engine = pair.open()
    one = engine.open()
    for refused in (
        lambda: engine.step([SequenceStep(one, [VOCAB])], accept_none),
        lambda: engine.truncate(one, 5),
        lambda: engine.close(one + 1),
    ):
        with pytest.raises(ValueError):
            refused()
    engine.step([SequenceStep(one, [1])], accept_none)
    pair.end()
    assert_alike(pair.engines)


def test_after_an_interrupted_pass_nothing_goes_on(pair, monkeypatch):
    engine = pair.open()
    one = engine.open()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.engines[0], "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step([SequenceStep(one, [1])], accept_none)
    with pytest.raises(QuasarError, match="the other ranks wait in a pass that rank 0 was interrupted in"):
        engine.step([SequenceStep(one, [1])], accept_none)
    pair.leader.meet()  # for the follower to hear of the end


def test_an_error_within_a_pass_of_rank_0_ends_all(pair, monkeypatch):
    engine = pair.open()
    monkeypatch.setattr(pair.engines[0], "step", lambda *_: 1 / 0)
    with pytest.raises(Failed, match="ZeroDivisionError"):
        engine.step([SequenceStep(engine.open(), [1])], accept_none)
    pair.leader.meet()


def test_several_engines_are_followed_in_turn(pair):
    engines = [pair.open(), pair.open()]
    sequence = engines[0].open()
    assert engines[1].open() == sequence
    for kept, each in enumerate(engines):
        each.step([SequenceStep(sequence, [1], Draft((2, 3)))], lambda *_, kept=kept: Acceptance((0,), kept))
    pair.end()
    assert [engine.caches for engine in pair.opened[1]] == [{sequence: [1]}, {sequence: [1, 2]}]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_load_is_named_and_another_engine_can_be_opened(pair, monkeypatch, rank):
    def broken(directory, manifest, threads, ranks):
        if ranks.rank == rank:
            raise QuasarError(f"rank{rank}.engine is missing")
        return stub()

    monkeypatch.setitem(ENGINES, "broken", broken)
    with pytest.raises(QuasarError) as caught:
        pair.leader.open(Path("engine"), "broken", None)
    assert str(caught.value) == f"rank {rank} on {Ranks.hosts[rank]}: rank{rank}.engine is missing"
    engine = pair.open()
    engine.step([SequenceStep(engine.open(), [1])], accept_none)
    pair.end()
    assert_alike(pair.engines)


def test_another_engine_on_one_rank_is_refused(pair, monkeypatch):
    main = threading.main_thread()
    monkeypatch.setattr(ranks, "_sha256", lambda path: ("a" if threading.current_thread() is main else "b") * 64)
    with pytest.raises(
        QuasarError, match=r"rank 1 on second has engine b{16}, rank 0 on first has a{16}; .* the same files in"
    ):
        pair.open()


def test_memory_is_that_of_the_rank_that_has_least(pair, monkeypatch):
    main = threading.main_thread()
    monkeypatch.setattr(ranks, "available_memory", lambda: 1000 if threading.current_thread() is main else 600)
    assert pair.open().available_memory == 600
    monkeypatch.setattr(Ranks, "hosts", ("one", "one"))  # both take from the same memory
    assert pair.open().available_memory == 300


def test_a_listener_sleeps_longer_the_longer_it_waits(monkeypatch):
    """At most a twentieth of what it has waited, and never more than 10 ms."""
    now, slept, polls = [0.0], [], [0]

    class Request:
        def Test(self) -> bool:
            polls[0] += 1
            now[0] += 2e-6
            return now[0] > 30.0

    def sleep(seconds: float) -> None:
        slept.append((now[0], seconds))
        now[0] += seconds

    listener = object.__new__(communicator.Communicator)
    listener.comm = type("Comm", (), {"Ibcast": lambda self, buffer: Request()})()
    listener._mpi = type("Mpi", (), {"BYTE": None})
    monkeypatch.setattr(communicator.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(communicator.time, "sleep", sleep)
    listener._receive(bytearray(8))
    assert all(seconds <= min(0.05 * waited + 1e-9, 0.01) for waited, seconds in slept)
    assert polls[0] < 3800  # about 100 a second


def test_a_process_that_no_launcher_started_loads_no_mpi(monkeypatch):
    for name in communicator._SIZES:
        monkeypatch.delenv(name, raising=False)
    assert communicator.launched_size() == 1
    monkeypatch.setenv("PMI_SIZE", "4")
    assert communicator.launched_size() == 4
