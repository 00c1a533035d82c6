"""Whatever goes wrong on a rank ends all of them, with one line that names the rank and the cause; no process stays behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from cpu_engines import RECIPES
from mpi import errors, run_ranks, start_ranks, write_ranks
from ranks import SIZES
from tiny import tiny_checkpoint

# Arguments: an engine directory, and what every rank does before and after its runner has answered once.
PROGRAM = """
import os, signal, sys, time
from quasar_trt import communicator, ranks
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
print(f"rank {rank} {os.getpid()}", flush=True)
exec(sys.argv[2])
runner = Runner.from_dir(sys.argv[1], drafter=None, engine="cpu", threads=1)
runner.generate([[1, 2, 3]], GREEDY)
print("answered", flush=True)
exec(sys.argv[3])
"""


@pytest.fixture(scope="module")
def engine_dirs(tmp_path_factory) -> dict[int, Path]:
    """Number of ranks -> engine directory."""
    config, recipe, tensors = tiny_checkpoint(0, RECIPES["int8"], **SIZES)
    root = tmp_path_factory.mktemp("engines")
    return {size: write_ranks(root / str(size), config, recipe, tensors, size) for size in (1, 2)}


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


def assert_gone(stdout: str) -> None:
    """None of the ranks that have told their process is there after a while, unless as a zombie that nobody has fetched."""
    pids = [int(line.split()[2]) for line in stdout.splitlines() if line.startswith("rank ")]
    assert pids
    deadline = time.monotonic() + 20
    for pid in pids:
        while (status := Path(f"/proc/{pid}/stat")).exists() and ") Z " not in status.read_text():
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.05)


FAULTS = {
    "follower raises": (
        "if rank == 1: CpuEngine.step = lambda *_: 1 / 0",
        r"error: rank 1 on .*: ZeroDivisionError\('division by zero'\)",
    ),
    "rank 0 raises within a pass": (
        "if rank == 0: CpuEngine.step = lambda *_: 1 / 0",
        r"error: rank 0 on .*: ZeroDivisionError\('division by zero'\)",
    ),
    "follower hangs": (
        "communicator.PATIENCE = 2\nif rank == 1: CpuEngine.step = lambda *_: time.sleep(1000)",
        "error: rank 0 on .*: no answer from rank 1 for 2 s; ended all ranks",
    ),
    "follower is stopped": (
        "communicator.PATIENCE = 2\nif rank == 1: CpuEngine.step = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)",
        "error: rank 0 on .*: no answer from rank 1 for 2 s; ended all ranks",
    ),
    "rank 0 hangs within a pass": (
        "communicator.PATIENCE = 2\nif rank == 0: CpuEngine.step = lambda *_: time.sleep(1000)",
        "error: rank 1 on .*: no answer from rank 0 for 2 s; ended all ranks",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_or_hangs_in_a_pass_ends_all(engine_dirs, program, fault):
    first, cause = FAULTS[fault]
    done = run_ranks(2, program, engine_dirs[2], first, "")
    assert done.returncode != 0 and "answered" not in done.stdout
    (line,) = errors(done.stderr)
    assert re.fullmatch(cause, line), line
    assert_gone(done.stdout)


REFUSALS = {
    "cannot load": (
        "if rank == 1: CpuEngine.__init__ = lambda *_, **__: 1 / 0",
        r"rank 1 on .*: ZeroDivisionError\('division by zero'\)",
    ),
    "another engine": (
        "if rank == 1: ranks._sha256 = lambda path: 'b' * 64",
        r"rank 1 on .* has engine b{16}, rank 0 on .* has [0-9a-f]{16}; all need the same quasar-trt, and the same files in .*",
    ),
    "another version": (
        "if rank == 1: ranks.quasar_trt.__version__ = '0.0'",
        r"rank 1 on .* has quasar-trt 0.0, rank 0 on .* has .*; all need the same quasar-trt, and .*",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_an_engine_that_one_rank_cannot_open_is_refused_by_all(engine_dirs, program, refusal):
    first, cause = REFUSALS[refusal]
    done = run_ranks(2, program, engine_dirs[2], first, "")
    assert done.returncode != 0 and "answered" not in done.stdout
    (line,) = errors(done.stderr)
    assert re.fullmatch(f"quasar_trt.errors.QuasarError: {cause}", line), line
    assert_gone(done.stdout)


@pytest.mark.parametrize(
    ("num_ranks", "size", "how"),
    [
        (
            3,
            2,
            "has tp_size 2, and this program runs on 3 ranks; start it as: mpirun -n 2 ...; or build it for another --tp-size",
        ),
        (
            2,
            1,
            "has tp_size 1, and this program runs on 2 ranks; start it without mpirun; or build it for another --tp-size",
        ),
    ],
)
def test_another_number_of_ranks_is_refused_in_one_line(engine_dirs, num_ranks, size, how):
    done = run_ranks(num_ranks, "-m", "quasar_trt.cli", "generate", engine_dirs[size], "hello", "--engine", "cpu")
    assert done.returncode == 1 and done.stdout == ""
    assert errors(done.stderr) == [f"error: {engine_dirs[size]} {how}"]


def test_a_damaged_file_of_another_rank_is_refused(engine_dirs, tmp_path):
    damaged = shutil.copytree(engine_dirs[2], tmp_path / "damaged")
    with open(damaged / "rank1.engine", "ab") as file:
        file.write(b"x")
    done = run_ranks(2, "-m", "quasar_trt.cli", "generate", damaged, "hello")
    assert done.returncode == 1 and done.stdout == ""
    (line,) = errors(done.stderr)
    assert "rank1.engine has" in line


SIGNALS = {
    "follower killed": (1, signal.SIGKILL),
    "rank 0 killed": (0, signal.SIGKILL),
    "rank 0 terminated": (0, signal.SIGTERM),
    "rank 0 interrupted": (0, signal.SIGINT),
    "mpirun terminated": (None, signal.SIGTERM),
    "mpirun interrupted": (None, signal.SIGINT),
    "mpirun killed": (None, signal.SIGKILL),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_ends_all(engine_dirs, program, name):
    rank, number = SIGNALS[name]
    busy = name != "rank 0 terminated"
    then = "while True: runner.generate([[1, 2, 3]], GREEDY)" if busy else "time.sleep(1000)"
    process = start_ranks(2, program, engine_dirs[2], "", then)
    told = []
    while not told or told[-1] != "answered\n":
        told.append(process.stdout.readline())
        assert told[-1], process.stderr.read()
    pids = {int(line.split()[1]): int(line.split()[2]) for line in told if line.startswith("rank ")}
    os.kill(process.pid if rank is None else pids[rank], number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert_gone("".join(told))


def test_a_follower_leaves_signals_to_rank_0(engine_dirs, program):
    """Which goes on with what it does before it ends."""
    signal_others = "os.kill(FOLLOWER, signal.SIGTERM); os.kill(FOLLOWER, signal.SIGINT); time.sleep(0.2)"
    then = f"FOLLOWER = int(open(sys.argv[1] + '/pid').read()); {signal_others}; runner.generate([[1]], GREEDY); print('again')"
    first = "if rank == 1: open(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))"
    done = run_ranks(2, program, engine_dirs[2], first, then)
    assert done.returncode == 0, done.stderr
    assert "again" in done.stdout
