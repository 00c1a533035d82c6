"""Two ranks of TensorRT-LLM's executor under mpirun, each a double: who gets requests, and that all of them end."""

from __future__ import annotations

import pytest
from llm_engines import write_llm_dir
from mpi import errors, run_ranks
from tiny import tiny_checkpoint

# A double in place of TensorRT-LLM. Its followers do nothing: rank 0's holds the whole model, and says what all would compute.
PROGRAM = """
import os, sys
from types import SimpleNamespace
from unittest.mock import patch
from executor_double import executor_double
from tiny import tiny_checkpoint
from quasar_trt.engines import executor_session
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
model = tiny_checkpoint(num_hidden_layers=1)
with (
    executor_double(ReferenceModel(*model), rank=rank, world_size=2) as bindings,
    patch.object(executor_session, "llm_release", lambda: "1.2.1"),
    patch.object(executor_session, "CudaDevice", lambda number: SimpleNamespace(sm=90, name="a double")),
    patch.object(executor_session.torch.cuda, "device_count", lambda: 2),
    patch.object(executor_session.Checkpoint, "open", lambda path: SimpleNamespace(config=model[0], recipe=model[1])),
):
    bindings.Executor.shutdown = lambda self: print(f"rank {rank} shuts down", flush=True)
    exec(sys.argv[2])
    runner = Runner.from_dir(sys.argv[1])
    (output,) = runner.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    print(f"rank {rank} answers with {len(output.outputs[0].token_ids)} ids", flush=True)
"""


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks") / "engine"
    return write_llm_dir(directory, tiny_checkpoint(num_hidden_layers=1), tp_size=2)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


def test_first_rank_answers_and_both_shut_down(engine_dir, program):
    run = run_ranks(2, program, engine_dir, "")
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["rank 0 answers with 4 ids", "rank 0 shuts down", "rank 1 shuts down"]


def test_rank_that_cannot_load_its_engine_ends_both(engine_dir, program):
    failing = """
def fail(*arguments):
    raise RuntimeError("no memory")
if rank == 1:
    bindings.Executor.__init__ = fail
"""
    run = run_ranks(2, program, engine_dir, failing)
    assert run.returncode
    (line,) = errors(run.stderr)
    assert "cannot be loaded: no memory; build the engine again" in line
