"""Several ranks with a plan each: which GPU and which plan a rank takes, how they meet, and what stops all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from network_interpreter import COLLECTIVES
from plan_double import CpuDevice, TensorRTDouble
from ranks import SIZES, shards
from tiny import tiny_checkpoint
from tiny_network import decoder_graph, real_network
from tiny_plan import SIZES as PLAN_SIZES
from tiny_plan import assert_same_logits, double, double_of, entry, open_double, steps, write_plan_dir

from quasar_trt.builders.build import build
from quasar_trt.engines import plan_ranks, tensorrt
from quasar_trt.engines.plan_session import PlanSession
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.engines.tensorrt import TensorRTEngine
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config

IDENTITY = b"the NCCL of these ranks"


class Ranks:
    """One of two ranks, each in a thread."""

    def __init__(self, rank: int, said: list, barrier: Barrier):
        self.rank, self.size, self.hosts = rank, 2, ["one", "other"]
        self._said, self._barrier = said, barrier
        self.watched = []

    def exchange(self, value):
        self._said[self.rank] = value
        self._barrier.wait(10)
        return list(self._said)

    def watch(self, progress):
        self.watched.append(progress)


def on_two_ranks(function) -> list:
    """function(ranks) of both; what it raises is its result."""
    said, barrier = [None, None], Barrier(2)

    def run(rank):
        try:
            return function(Ranks(rank, said, barrier))
        except QuasarError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.fixture
def nccl(monkeypatch) -> list:
    """Who joined which communicator."""
    joined = []

    def init_rank(size, identity, rank):
        joined.append((size, identity, rank))
        return f"communicator of {rank}"

    monkeypatch.setattr(torch._C, "_nccl_unique_id", None, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "unique_id", lambda: IDENTITY)
    monkeypatch.setattr(torch.cuda.nccl, "init_rank", init_rank)
    return joined


def communicators(identity) -> list:
    """What both ranks get, on GPUs that `identity(rank)` names."""
    return on_two_ranks(lambda ranks: plan_ranks.nccl_communicator(ranks, CpuDevice(identity=identity(ranks.rank))))


def test_ranks_meet_by_the_identity_that_the_first_made(nccl):
    assert communicators("GPU-{}".format) == ["communicator of 0", "communicator of 1"]
    assert sorted(nccl) == [(2, IDENTITY, 0), (2, IDENTITY, 1)]


def test_ranks_do_not_share_a_gpu(nccl):
    for error in communicators(lambda rank: "GPU-7"):
        assert "ranks 0, 1 share a GPU; start no more ranks" in str(error)
    assert nccl == []


def test_a_torch_without_nccl_is_told_on_all_ranks(nccl, monkeypatch):
    monkeypatch.delattr(torch._C, "_nccl_unique_id")
    for error in communicators("GPU-{}".format):
        assert "rank 0 on one: torch" in str(error) and "is built without NCCL" in str(error)
    assert nccl == []


def test_ranks_of_one_machine_take_its_gpus_in_turn(monkeypatch):
    monkeypatch.setattr(plan_ranks, "CudaDevice", lambda index=None: index)
    hosts = ["a", "b", "a", "a", "b"]
    of_ranks = [plan_ranks.device_of(SimpleNamespace(rank=rank, hosts=hosts)) for rank in range(5)]
    assert of_ranks == [0, 0, 1, 2, 1] and plan_ranks.device_of(None) is None


def test_each_rank_runs_its_own_plan_with_the_communicator(hf_dir, engine_dirs, tmp_path, nccl, monkeypatch):
    build(str(hf_dir), tmp_path / "source", Recipe("none"), tp_size=2, progress=False)
    directory = write_plan_dir(tmp_path / "source", tmp_path / "engine")
    stack = double_of(engine_dirs["BF16"], rtx=False)
    monkeypatch.setattr(tensorrt, "load_stack", lambda name: stack)
    monkeypatch.setattr(tensorrt, "device_of", lambda ranks: CpuDevice(identity=f"GPU-{ranks.rank}"))

    def open_part(ranks):
        engine = TensorRTEngine.from_dir(directory, ranks)
        assert stack.contexts == [] and not engine.capabilities.hidden_states
        engine.join(ranks)
        (progress,) = ranks.watched
        return engine.config.num_attention_heads, progress()

    assert on_two_ranks(open_part) == [(3, 2)] * 2  # of six heads; even: nothing is under way
    assert sorted(stack.loaded) == [b"plan 0", b"plan 1"]
    assert sorted(stack.communicators) == ["communicator of 0", "communicator of 1"]


def test_ranks_together_give_the_logits_of_the_whole_model(tmp_path):
    config, recipe, tensors = tiny_checkpoint(num_hidden_layers=2, **SIZES)
    of_rank, parts, barrier = rank_config(config, 2), [None, None], Barrier(2)

    def engine(rank: int, part) -> TensorRTEngine:
        graph = decoder_graph(real_network(), of_rank, recipe, part, PLAN_SIZES.capacity)
        stack = TensorRTDouble(graph, PLAN_SIZES, CpuDevice(), rtx=False)

        def collective(operation, tensor):
            parts[rank] = tensor
            barrier.wait(10)
            result = COLLECTIVES[operation](list(parts))
            barrier.wait(10)
            return result

        stack.collective = collective
        path = tmp_path / f"rank{rank}.sm80.engine"
        path.write_bytes(b"plan")
        session = PlanSession(stack, path, stack.device, of_rank, PLAN_SIZES, name=f"rank {rank}")
        session.start(lambda: "a communicator")
        return TensorRTEngine(session, of_rank, PLAN_SIZES, weight_bytes_per_step=1)

    engines = [engine(rank, part) for rank, part in enumerate(shards(config, tensors, 2))]
    reference = ReferenceEngine(ReferenceModel(config, recipe, tensors), max_seq_len=48, kv_dtype=torch.float32)
    for each in (*engines, reference):
        each.open(), each.open()
    script = [
        [entry(0, 12, seed=1), entry(1, 4, seed=2)],
        [entry(0, 1, seed=3, parents=(-1, -1)), entry(1, 1, 1, seed=8)],
        [entry(0, 1, 2, seed=4), entry(1, 1, 1, seed=9)],
    ]
    with ThreadPoolExecutor(2) as pool:
        for batch in script:
            # of the tree the second path: the ranks' caches stay alike
            keep = lambda index, drafted, batch=batch: (1,) if batch[index].draft.is_tree else min(1, drafted)  # noqa: E731
            expected = steps(reference, batch, keep)
            for found in pool.map(lambda each, batch=batch, keep=keep: steps(each, batch, keep), engines):
                assert_same_logits(found, expected)
    assert [each._session.device.replayed for each in engines] == [1, 1]


def test_every_context_of_a_rank_has_its_communicator(tmp_path):
    stack = double(rtx=False)
    engine = open_double(stack, tmp_path, communicator="a communicator")
    engine.open()
    for drafted in (0, 1, 2):
        steps(engine, [entry(0, 1, drafted)])
    assert stack.communicators == ["a communicator"] * 4 == ["a communicator"] * len(stack.contexts)
    with pytest.raises(QuasarError, match="cannot be run: set_communicator was refused"):
        open_double(double(rtx=False, refuses="set_communicator"), tmp_path, communicator="a communicator")
