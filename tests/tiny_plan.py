"""A tiny plan for the engine of plans: limits, model, the graph that a double interprets, and passes to compare."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import shutil
from pathlib import Path

import numpy as np
import torch
from network_graph import Graph
from plan_double import CpuDevice, TensorRTDouble
from tiny import random_ids, tiny_checkpoint
from tiny_network import decoder_graph, real_network

from quasar_trt.checkpoint import Checkpoint
from quasar_trt.drafters.base import Draft
from quasar_trt.engines import cuda_device, plan_ranks, tensorrt
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.engines.plan_session import PlanSession
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel, load_tensors
from quasar_trt.engines.tensorrt import TensorRTEngine
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.plan import Plan
from quasar_trt.tensorfile import FileRecord

LIMITS = Limits(max_batch_size=4, max_seq_len=48, max_draft_len=3)
SIZES = PlanSizes(LIMITS, prefill_rows=10)
MODEL = tiny_checkpoint(num_hidden_layers=2)


@functools.cache
def graph(capacity: int = SIZES.capacity) -> Graph:
    return decoder_graph(real_network(), *MODEL, capacity=capacity)


def double(rtx: bool = True, **options) -> TensorRTDouble:
    return TensorRTDouble(graph(), SIZES, CpuDevice(), rtx, **options)


def open_session(trt: TensorRTDouble, directory, sizes: PlanSizes = SIZES, communicator: object = None) -> PlanSession:
    path = directory / "rank0.sm80.engine"
    path.write_bytes(b"plan")
    session = PlanSession(trt, path, trt.device, MODEL[0], sizes, name="tiny")
    session.start(lambda: communicator)
    return session


def open_double(trt: TensorRTDouble, directory, **options) -> TensorRTEngine:
    return TensorRTEngine(open_session(trt, directory, **options), MODEL[0], SIZES, weight_bytes_per_step=1000)


def write_plan_dir(source: Path, directory: Path, sms: tuple[int, ...] = (80,), limits: Limits = LIMITS) -> Path:
    """The engine directory `source` as one with plans of six bytes for each rank."""
    shutil.copytree(source, directory)
    manifest = Manifest.open(directory)
    files = {name: record for name, record in manifest.files.items() if name.startswith("checkpoint/")}
    for rank, sm in itertools.product(range(manifest.tp_size), sms):
        name, content = f"rank{rank}.sm{sm}.engine", f"plan {rank}".encode()
        (directory / name).write_bytes(content)
        files[name] = FileRecord(len(content), *[hashlib.sha256(content).hexdigest()] * 2)
    plan = Plan("tensorrt-rtx", TensorRTDouble.__version__, sms, "weight_only", SIZES.prefill_rows)
    dataclasses.replace(manifest, target="tensorrt-rtx", files=files, plan=plan, limits=limits).write(directory)
    return directory


def install(monkeypatch, trt: TensorRTDouble) -> TensorRTDouble:
    """As the stack of every target, with its GPU."""
    monkeypatch.setattr(tensorrt, "load_stack", lambda stack: trt)
    for module in (cuda_device, plan_ranks):
        monkeypatch.setattr(module, "CudaDevice", lambda index=None: trt.device)
    return trt


def double_of(directory: Path, rtx: bool = True, limits: Limits = LIMITS) -> TensorRTDouble:
    """Whose plans compute the checkpoint in an engine directory with these limits."""
    checkpoint, sizes = Checkpoint.open(directory / "checkpoint"), PlanSizes(limits, SIZES.prefill_rows)
    tensors = load_tensors(checkpoint.paths[0])
    computed = decoder_graph(real_network(), checkpoint.config, checkpoint.recipe, tensors, sizes.capacity)
    return TensorRTDouble(computed, sizes, CpuDevice(), rtx)


def reference_engine() -> ReferenceEngine:
    return ReferenceEngine(ReferenceModel(*MODEL), max_seq_len=48, kv_dtype=torch.float32)


def steps(engine, batch, keep=lambda index, drafted: drafted):
    """Runs one pass; returns the logits that `accept` saw, by index. keep: accepted tokens of an entry's draft, of a tree the path."""
    seen = {}

    def accept(index, logits):
        seen[index] = logits.copy()
        kept = keep(index, len(logits) - 1)
        return Acceptance((0,), len(kept), kept) if isinstance(kept, tuple) else Acceptance((0,), kept)

    engine.step(batch, accept)
    return seen


def entry(sequence, count, drafted=0, seed=0, parents=None, **options):
    """parents: of the draft tokens where they are a tree."""
    drafted = drafted if parents is None else len(parents)
    ids = random_ids(MODEL[0], count + drafted, seed=seed)
    return SequenceStep(sequence, ids[:count], Draft(tuple(ids[count:]), parents), **options)


def assert_same_logits(found, expected):
    assert found.keys() == expected.keys()
    for index, logits in found.items():
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected[index], atol=2e-4)
