"""Whatever goes wrong on a rank ends all of them, with one line that names the rank and the cause; no process stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from cpu_engines import RECIPES
from mpi import errors, run_ranks, start_ranks, write_ranks
from ranks import SIZES
from tiny import tiny_checkpoint

from quasar_trt.engines import open_engine
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.errors import QuasarError

# Prints the ids of processes, and rank 0's answer; arguments: engine directory, what every rank does first.
PROGRAM = """
import os, signal, sys, time
from quasar_trt import communicator, ranks
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
print(os.getpid(), flush=True)
exec(sys.argv[2])
runner = Runner.from_dir(sys.argv[1], drafter=None, engine="cpu", threads=1)
print("opened", flush=True)
print(runner.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids, flush=True)
exec(sys.argv[3])
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    config, recipe, tensors = tiny_checkpoint(0, RECIPES["int8"], **SIZES)
    return write_ranks(tmp_path_factory.mktemp("engines") / "two", config, recipe, tensors, 2)


@pytest.fixture
def program(tmp_path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def processes(stdout: str) -> list[int]:
    return [int(line) for line in stdout.splitlines() if line.isdigit()]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{alive} are still there"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("first", "cause"),
    [
        ("if rank == 1: CpuEngine.step = lambda *_: 1 / 0", "error: rank 1 on .*: ZeroDivisionError"),
        ("if rank == 0: CpuEngine.step = lambda *_: 1 / 0", "error: rank 0 on .*: ZeroDivisionError"),
        (
            "communicator.PATIENCE = 2\nif rank == 1: CpuEngine.step = lambda *_: time.sleep(1000)",
            "error: rank 0 on .*: no answer from rank 1 for 2 s; ended all ranks",
        ),
        (
            "communicator.PATIENCE = 2\nif rank == 1: CpuEngine.step = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)",
            "error: rank 0 on .*: no answer from rank 1 for 2 s; ended all ranks",
        ),
        (
            "communicator.PATIENCE = 2\nif rank == 0: CpuEngine.step = lambda *_: time.sleep(1000)",
            "error: rank 1 on .*: no answer from rank 0 for 2 s; ended all ranks",
        ),
    ],
    ids=["follower raises", "leader raises", "follower hangs", "follower is stopped", "leader hangs"],
)
def test_a_rank_that_fails_or_hangs_in_a_pass_ends_all(two_ranks, program, first, cause):
    done = run_ranks(2, program, two_ranks, first, "")
    assert done.returncode != 0
    (line,) = errors(done.stderr)
    assert pytest.importorskip("re").match(cause, line), line
    assert "opened" not in done.stdout or "[" not in done.stdout
    assert_gone(processes(done.stdout))
