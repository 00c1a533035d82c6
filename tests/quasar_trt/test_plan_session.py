"""Passes of a plan on a double of TensorRT's runtime: memory, shapes, CUDA graphs, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import plan_double
import pytest
import tensorrt_rtx as trt
from plan_double import CpuDevice, TensorRTDouble
from tiny_plan import (
    SIZES,
    assert_same_logits,
    double,
    entry,
    graph,
    open_double,
    open_session,
    reference_engine,
    steps,
)

from quasar_trt.engines import plan_session
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Limits


@pytest.fixture
def tensorrt() -> TensorRTDouble:
    return double(rtx=False)


@pytest.fixture
def reference():
    return reference_engine()


@pytest.mark.parametrize("method", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_what_the_runtime_refuses_is_told_with_its_reason(tmp_path, method):
    trt = double(refuses=method)
    engine = open_double(trt, tmp_path)
    engine.open()
    trt.logger.log(trt.ILogger.ERROR, "something before")
    with pytest.raises(RuntimeError, match=f"cannot run this pass: {method} was refused"):
        steps(engine, [entry(0, 3)])
    assert engine.length(0) == 0


def test_compiled_kernels_are_kept_for_the_next_start(tmp_path, monkeypatch):
    trt = double()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for found in ([], [b"kernels"]):
        engine = open_double(trt, tmp_path)
        assert trt.kernels == found
        del engine  # with its session
        assert (tmp_path / "cache" / "quasar-trt" / "kernels" / "tiny.cache").read_bytes() == b"kernels"


def test_memory_that_does_not_suffice_is_told_with_both_numbers(tmp_path):
    caches = 2 * 2 * 4 * 2 * 64 * 16 * 2  # layers, keys and values, slots, heads, capacity, head size, bytes
    trt = double(device_memory=5 * 10**8)
    device = trt.device
    device.free = caches  # the plan has 4 bytes more
    with pytest.raises(QuasarError, match=r"needs 0.00 GB on a double, 0.00 GB are free.*max_batch_size 4 or max_seq"):
        open_double(trt, tmp_path)
    assert trt.loaded == []
    device.free = 4 * 10**8
    with pytest.raises(QuasarError, match=r"needs 0.50 GB on a double, 0.40 GB are free"):
        open_double(trt, tmp_path)
    assert trt.loaded == [b"plan"]
    device.free = 6 * 10**8
    open_double(trt, tmp_path)


def test_a_plan_that_cannot_be_loaded_is_told_with_the_first_reason(tmp_path):
    with pytest.raises(QuasarError, match=r"rank0.sm80.engine cannot be loaded: the magic tag does not match; build"):
        open_double(TensorRTDouble(None, SIZES, CpuDevice()), tmp_path)


def test_passes_of_many_lengths_have_few_shapes(tmp_path):
    sizes = PlanSizes(Limits(max_batch_size=2, max_seq_len=700, max_draft_len=3), prefill_rows=10)
    trt = TensorRTDouble(graph(sizes.capacity), sizes, CpuDevice())
    session = open_session(trt, tmp_path, sizes)
    for slot in (0, 1):
        session.memory.clear(slot)
    for past in (0, 252, 253, 508, 509, 700):
        session.run(0, np.zeros((2, 4), np.int32), np.array([past, 0], np.int32), [0])
    assert trt.spans == [256, 256, 512, 512, 704, 704]


# CUDA graphs


def verify(engine, rows, seed, handles=(0,)):
    seen = steps(engine, [entry(handle, 1, rows - 1, seed=seed + handle) for handle in handles], lambda *_: 0)
    for handle in handles:
        engine.truncate(handle, engine.length(handle) - 1)
    return seen


def test_a_verify_pass_is_captured_once_per_shape_and_replayed(tensorrt, tmp_path, reference):
    engine, device = open_double(tensorrt, tmp_path), tensorrt.device
    for each in (engine, reference):
        each.open(), each.open()
        steps(each, [entry(0, 5, seed=1)])
        steps(each, [entry(1, 7, seed=2)])
    assert device.replayed == 0 and len(tensorrt.contexts) == 1  # prompts are no verify passes
    shapes = [(3, (0,)), (1, (0,)), (3, (1,)), (3, (0, 1))]
    for turn in range(3):
        for number, (rows, handles) in enumerate(shapes):
            seed = 100 * turn + 10 * number
            found, expected = (verify(each, rows, seed, handles) for each in (engine, reference))
            assert_same_logits(found, expected)
    assert device.replayed == 2 * len(shapes)
    assert len(tensorrt.contexts) == 1 + len(shapes)
    assert len(tensorrt.passes) == 2 + 3 * len(shapes)  # what prepares for a capture is the pass itself


def test_the_graphs_used_last_are_kept(tensorrt, tmp_path, reference, monkeypatch):
    monkeypatch.setattr(plan_session, "_MOST_GRAPHS", 2)
    engine, device = open_double(tensorrt, tmp_path), tensorrt.device
    for each in (engine, reference):
        each.open()
        steps(each, [entry(0, 5, seed=1)])
    replayed = []
    for seed, rows in enumerate([1, 2, 1, 3, 1, 2, 3]):
        before = device.replayed
        assert_same_logits(verify(engine, rows, seed), verify(reference, rows, seed))
        replayed.append(device.replayed - before)
    assert replayed == [0, 0, 1, 0, 1, 0, 0]
    assert len(tensorrt.contexts) == 3  # those of graphs that went are used again


def test_tensorrt_rtx_captures_by_itself(tmp_path):
    trt = double()
    engine = open_double(trt, tmp_path)
    engine.open()
    for _ in range(2):
        verify(engine, 2, 0)
    assert trt.device.replayed == 0 and len(trt.contexts) == 1


# The double


def test_the_double_has_no_method_that_tensorrt_lacks():
    for real, made in ((trt.IExecutionContext, plan_double._Context), (trt.IRuntimeConfig, plan_double._RuntimeConfig)):
        names = [name for name in vars(made) if not name.startswith("_")]
        of_its_cache = ("deserialize", "serialize", "kernels")  # a double is its own cache of kernels
        assert all(hasattr(real, name) for name in names if name not in of_its_cache), names
    assert hasattr(trt, "CudaGraphStrategy") and hasattr(trt.ExecutionContextAllocationStrategy, "USER_MANAGED")


def test_logits_that_nobody_waited_for_are_not_there(tensorrt, tmp_path, monkeypatch):
    engine = open_double(tensorrt, tmp_path)
    engine.open()
    monkeypatch.setattr(tensorrt.device, "wait", lambda: None)
    assert np.isnan(verify(engine, 2, 1)[0]).all()


def test_inputs_that_are_overwritten_before_the_pass_is_done_are_lost(tensorrt, tmp_path, reference, monkeypatch):
    engine = open_double(tensorrt, tmp_path)
    engine.open(), reference.open()
    memory = engine._session.memory

    def receive(count, rows, real=memory.receive):
        memory._host_inputs.zero_()
        return real(count, rows)

    monkeypatch.setattr(memory, "receive", receive)
    with pytest.raises(AssertionError):
        assert_same_logits(verify(engine, 2, 1), verify(reference, 2, 1))


def test_a_graph_whose_context_has_changed_is_not_replayed(tensorrt, tmp_path):
    engine = open_double(tensorrt, tmp_path)
    engine.open()
    verify(engine, 2, 1)
    ((shape, (context, _)),) = engine._session._graphs.items()
    context.bind(dataclasses.replace(shape, rows=1))
    with pytest.raises(AssertionError, match="changed since its graph was captured"):
        verify(engine, 2, 1)


def test_a_shape_is_not_captured_unprepared(tensorrt, tmp_path):
    session = open_session(tensorrt, tmp_path)
    shape = session.memory.send(0, np.zeros((1, 2), np.int32), np.zeros(1, np.int32), [0], {})
    session._context.bind(shape)
    with pytest.raises(AssertionError, match="captured before TensorRT has prepared itself"):
        tensorrt.device.capture(session._context.execute)
