"""Ranks as threads of one process, on every instruction set: the bits of one rank. Without MPI."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cpu_engines import RECIPES
from engine_steps import rows_of
from mpi import write_ranks
from tiny import random_ids, tiny_checkpoint

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.plugins import native

SIZES = {"vocab_size": 131, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 96}
RANKS = 3


class Ranks:
    """The `Communicator` of one of RANKS threads; `shared` are a barrier and a place for each one's array."""

    size = RANKS
    num_sharing = RANKS

    def __init__(self, rank: int, shared: tuple[threading.Barrier, list]):
        self.rank = rank
        self._barrier, self._arrays = shared
        self.collectives = {
            "largest": lambda x: self._reduce(x, np.maximum.reduce),
            "add": lambda x: self._reduce(x, np.add.reduce),
            "gather": self._gather,
            "collect": self._collect,
        }

    def watch(self, progress) -> None:
        pass

    def _everyones(self, x: np.ndarray) -> list[np.ndarray]:
        self._arrays[self.rank] = x.copy()
        self._barrier.wait()
        arrays = list(self._arrays)
        self._barrier.wait()
        return arrays

    def _reduce(self, x: np.ndarray, operation) -> None:
        x[...] = operation(self._everyones(x))

    def _gather(self, x: np.ndarray) -> None:
        x[...] = self._everyones(x[self.rank])

    def _collect(self, x: np.ndarray) -> None:
        parts = self._everyones(x[0] if self.rank == 0 else x)
        if self.rank == 0:
            x[...] = parts


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize(
    ("recipe", "biases"),
    [
        ("int8", False),
        ("int8 with int8 head", True),
        ("int8 with rescored head", False),
        ("16-bit activations", True),
    ],
)
def test_ranks_of_whole_numbers_have_the_bits_of_one_rank(recipe, biases, isa, tmp_path):
    config, chosen, tensors = tiny_checkpoint(2, RECIPES[recipe], attention_bias=biases, mlp_bias=biases, **SIZES)
    ids = random_ids(config, 70)
    batch = [SequenceStep(0, ids[:65], Draft(tuple(ids[65:])))]

    def logits(engine: CpuEngine) -> np.ndarray:
        engine.open()
        return rows_of(engine, batch)[0]

    one = write_ranks(tmp_path / "one", config, chosen, tensors, 1)
    three = write_ranks(tmp_path / "three", config, chosen, tensors, RANKS)
    expected = logits(CpuEngine(one / "rank0.engine", max_seq_len=80, threads=1, isa=isa))
    shared = threading.Barrier(RANKS, timeout=20), [None] * RANKS
    engines = [
        CpuEngine(three / f"rank{rank}.engine", max_seq_len=80, threads=2, isa=isa, ranks=Ranks(rank, shared))
        for rank in range(RANKS)
    ]
    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(logits, engines))
    assert np.array_equal(found[0], expected)
    assert [rows.shape for rows in found[1:]] == [(0, config.vocab_size)] * (RANKS - 1)
    assert all(engine.communication_seconds > 0 for engine in engines)


def test_what_a_collective_raises_comes_out_of_the_step(tmp_path):
    config, chosen, tensors = tiny_checkpoint(2, RECIPES["int8"], **SIZES)
    directory = write_ranks(tmp_path / "three", config, chosen, tensors, RANKS)
    ranks = Ranks(0, (threading.Barrier(1), [None]))
    calls = []

    def fail(x):
        calls.append(x)
        raise OSError("the link is down")

    ranks.collectives = dict.fromkeys(ranks.collectives, fail)
    engine = CpuEngine(directory / "rank0.engine", max_seq_len=80, threads=2, ranks=ranks)
    sequence = engine.open()
    for attempt in (1, 2):
        with pytest.raises(OSError, match="the link is down"):
            rows_of(engine, [SequenceStep(sequence, [1, 2])])
        assert engine.length(sequence) == 0
        assert len(calls) == attempt  # the rest of the pass calls nobody
