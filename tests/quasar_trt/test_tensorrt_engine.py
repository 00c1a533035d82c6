"""The engine of TensorRT plans, on a double of the runtime whose plan is the real network, interpreted."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from plan_double import CpuDevice, TensorRTDouble
from tiny import random_ids, tiny_checkpoint, write_engine_dir
from tiny_network import decoder_graph, real_network

from quasar_trt.drafters.base import Draft
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import cuda_device, open_engine, plan_session, tensorrt
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.plan_bindings import INPUT_IDS, LOGITS_ROWS, SPAN, PlanSizes
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.engines.tensorrt import TensorRTEngine
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.plan import Plan
from quasar_trt.prefix_cache import PrefixCache
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.tensorfile import FileRecord

LIMITS = Limits(max_batch_size=4, max_seq_len=48, max_draft_len=3)
SIZES = PlanSizes(LIMITS, prefill_rows=10)
MODEL = tiny_checkpoint(num_hidden_layers=2)


@pytest.fixture(scope="module")
def graph():
    return decoder_graph(real_network(), *MODEL, capacity=SIZES.capacity)


@pytest.fixture
def trt(graph):
    return TensorRTDouble(graph, SIZES)


@pytest.fixture
def engine(trt, tmp_path):
    return open_double(trt, tmp_path)


@pytest.fixture
def reference():
    return ReferenceEngine(ReferenceModel(*MODEL), max_seq_len=48, kv_dtype=torch.float32)


def open_double(trt, tmp_path, device=None):
    path = tmp_path / "rank0.sm80.engine"
    path.write_bytes(b"plan")
    session = plan_session.PlanSession(trt, path, device or CpuDevice(), MODEL[0], SIZES, name="tiny")
    return TensorRTEngine(session, MODEL[0], SIZES, weight_bytes_per_step=1000)


def steps(engine, batch, keep=lambda index, drafted: drafted):
    """Runs one pass; returns the logits that `accept` saw, by index. keep: accepted tokens of an entry's draft."""
    seen = {}

    def accept(index, logits):
        seen[index] = logits.copy()
        return Acceptance((0,), keep(index, len(logits) - 1))

    engine.step(batch, accept)
    return seen


def entry(sequence, count, drafted=0, seed=0, **options):
    ids = random_ids(MODEL[0], count + drafted, seed=seed)
    return SequenceStep(sequence, ids[:count], Draft(tuple(ids[count:])), **options)


def assert_same_logits(found, expected):
    assert found.keys() == expected.keys()
    for index, logits in found.items():
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected[index], atol=2e-4)


def test_passes_give_the_logits_of_the_reference_engine(engine, reference, trt):
    for each in (engine, reference):
        for _ in range(3):
            each.open()
    script = [
        # prompts: one longer than a chunk beside a short one, and one whose logits nobody asks for
        ([entry(0, 12, seed=1), entry(1, 4, seed=2)], [0, 0]),
        ([entry(2, 13, seed=3, needs_logits=False)], []),
        # a ragged verify pass: all, none and some of the draft is kept
        ([entry(0, 1, 3, seed=4), entry(2, 2, 1, seed=5), entry(1, 1, 2, seed=6)], [3, 0, 1]),
        # the slot between two that run does not
        ([entry(2, 1, 3, seed=7), entry(0, 1, seed=8)], [2, 0]),
        # a draft that is longer than the plan's, accepted whole: how fidelity reads logits
        ([entry(1, 1, 13, seed=9), entry(0, 1, 1, seed=10)], [13, 0]),
        ([entry(1, 1, 3, seed=11), entry(2, 1, seed=12), entry(0, 1, seed=13)], [0, 0, 0]),
    ]
    for batch, kept in script:
        keep = lambda index, drafted, kept=kept: kept[index]  # noqa: E731
        assert_same_logits(steps(engine, batch, keep), steps(reference, batch, keep))
        assert [engine.length(handle) for handle in range(3)] == [reference.length(handle) for handle in range(3)]
    # prompts go alone in chunks of 10 rows; verify passes have logits of every row, padding too
    assert [(shapes[INPUT_IDS], shapes[LOGITS_ROWS]) for shapes in trt.passes] == [
        ((1, 4), (4,)),
        *[((1, 10), (1,)), ((1, 2), (2,))],
        *[((1, 10), (1,)), ((1, 3), (3,))],
        ((3, 4), (12,)),
        ((3, 4), (12,)),
        ((1, 2), (2,)),
        *[((1, 10), (10,)), ((1, 4), (4,))],
        ((3, 4), (12,)),
    ]


def test_a_sequence_may_fill_the_cache_beside_a_longer_draft(engine, reference):
    for each in (engine, reference):
        each.open(), each.open()
    prompt = [[entry(0, 15, seed=seed)] for seed in range(3)] + [[entry(0, 2, seed=3)]]
    for batch in (*prompt, [entry(0, 1, seed=2), entry(1, 1, 3, seed=3)]):
        assert_same_logits(steps(engine, batch), steps(reference, batch))
    assert engine.length(0) == 48
    assert_same_logits(steps(engine, [entry(1, 1, 3, seed=4)]), steps(reference, [entry(1, 1, 3, seed=4)]))
    with pytest.raises(ValueError, match="would hold 49 tokens; allowed: 48"):
        steps(engine, [entry(0, 1)])


def test_rollback_leaves_nothing_behind(engine, reference):
    for each in (engine, reference):
        each.open()
        steps(each, [entry(0, 9, seed=1)])
        each.truncate(0, 4)
    assert_same_logits(steps(engine, [entry(0, 1, 2, seed=2)]), steps(reference, [entry(0, 1, 2, seed=2)]))
    assert engine.length(0) == 7
    for length in (-1, 8):
        with pytest.raises(ValueError, match="it holds 7"):
            engine.truncate(0, length)


def test_slots_are_used_again_and_handles_are_not(engine, reference):
    for each in (engine, reference):
        handles = [each.open() for _ in range(4)]
        steps(each, [entry(1, 9, seed=1)])
        each.close(1)
    with pytest.raises(ValueError, match="sequence 1 is not open"):
        engine.length(1)
    assert engine.open() == 4 and reference.open() == 4
    assert engine.length(4) == 0
    assert_same_logits(steps(engine, [entry(4, 3, seed=2)]), steps(reference, [entry(4, 3, seed=2)]))
    with pytest.raises(QuasarError, match=r"all 4 sequences that this engine holds are open.*max_batch_size"):
        engine.open()
    assert len(handles) == LIMITS.max_batch_size


def test_what_a_slot_held_before_does_no_harm(trt, tmp_path, reference):
    engine = open_double(trt, tmp_path)
    for cache in engine._session._caches.values():
        cache.fill_(torch.nan)
    for each in (engine, reference):
        each.open(), each.open()
    for batch in ([entry(0, 7, seed=1), entry(1, 2, seed=2)], [entry(0, 1, seed=3), entry(1, 1, 1, seed=4)]):
        assert_same_logits(steps(engine, batch), steps(reference, batch))


def test_a_failing_accept_changes_nothing(engine):
    engine.open(), engine.open()
    steps(engine, [entry(0, 5, seed=1), entry(1, 2, seed=2)])
    before = steps(engine, [entry(0, 1, 2, seed=3)], lambda index, drafted: 0)
    engine.truncate(0, 5)

    def accept(index, logits):
        if index:
            raise KeyboardInterrupt
        return Acceptance((0,), 2)

    with pytest.raises(KeyboardInterrupt):
        engine.step([entry(0, 1, 2, seed=3), entry(1, 1, seed=4)], accept)
    with pytest.raises(ValueError, match="3 accepted tokens of 2"):
        engine.step([entry(0, 1, 2, seed=3)], lambda index, logits: Acceptance((0,), 3))
    assert [engine.length(0), engine.length(1)] == [5, 2]
    assert_same_logits(steps(engine, [entry(0, 1, 2, seed=3)]), before)


def test_drafted_generation_equals_plain_generation_of_the_reference_engine(trt, tmp_path, reference):
    prompts = [random_ids(MODEL[0], 6, seed=seed) * 2 for seed in range(5)]  # more than there are slots
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    plain = Runner(reference, max_batch_size=4, max_draft_len=3).generate(prompts, params)
    drafter = make_drafter("suffix", {"num_speculative_tokens": 3})
    drafted = Runner(open_double(trt, tmp_path), drafter=drafter, max_batch_size=4, max_draft_len=3)
    outputs = drafted.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    assert drafted.stats.num_accepted_tokens > 0


def test_every_slot_is_used_again_where_prompts_begin_alike(trt, tmp_path, reference, monkeypatch):
    monkeypatch.setattr(PrefixCache, "min_length", 4)
    shared = random_ids(MODEL[0], 20)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    runners = [Runner(each, max_batch_size=4, max_draft_len=3) for each in (open_double(trt, tmp_path), reference)]
    for turn in range(3):
        prompts = [[*shared, *random_ids(MODEL[0], 3, seed=10 * turn + i)] for i in range(4)]
        found, expected = (runner.generate(prompts, params) for runner in runners)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]


def test_the_runners_budget_of_host_memory_does_not_bound_a_plan(engine):
    assert Runner(engine, max_batch_size=4, max_draft_len=3, kv_cache_memory_bytes=1).max_seq_len == 48
    with pytest.raises(ValueError, match="cannot be shared"):
        engine.fork(engine.open())


def test_capabilities_are_those_of_the_plan(engine):
    assert engine.capabilities.max_rows == 16
    assert not engine.capabilities.exact and not engine.capabilities.tree and not engine.capabilities.fork
    with pytest.raises(ValueError, match="17 rows; this engine allows 16"):
        engine.open()
        steps(engine, [entry(0, 17)])


@pytest.mark.parametrize("method", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_what_the_runtime_refuses_is_told_with_its_reason(graph, tmp_path, method):
    trt = TensorRTDouble(graph, SIZES, refuses=method)
    engine = open_double(trt, tmp_path)
    engine.open()
    trt.logger.log(trt.ILogger.ERROR, "something before")
    with pytest.raises(RuntimeError, match=f"cannot run this pass: {method} was refused"):
        steps(engine, [entry(0, 3)])
    assert engine.length(0) == 0


def test_compiled_kernels_are_kept_for_the_next_start(trt, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for found in ([], [b"kernels"]):
        engine = open_double(trt, tmp_path)
        assert trt.kernels == found
        del engine  # with its session
        assert (tmp_path / "cache" / "quasar-trt" / "kernels" / "tiny.cache").read_bytes() == b"kernels"


def test_memory_that_does_not_suffice_is_told_with_both_numbers(graph, tmp_path):
    caches = 2 * 2 * 4 * 2 * 52 * 16 * 2  # layers, keys and values, slots, heads, capacity, head size, bytes
    trt = TensorRTDouble(graph, SIZES, device_memory=5 * 10**8)
    device = CpuDevice(free=caches)  # the plan has 4 bytes more
    with pytest.raises(QuasarError, match=r"needs 0.00 GB on a double, 0.00 GB are free.*max_batch_size 4 or max_seq"):
        open_double(trt, tmp_path, device)
    assert trt.loaded == []
    with pytest.raises(QuasarError, match=r"needs 0.50 GB on a double, 0.40 GB are free"):
        open_double(trt, tmp_path, CpuDevice(free=4 * 10**8))
    assert trt.loaded == [b"plan"]
    open_double(trt, tmp_path, CpuDevice(free=6 * 10**8))


def test_a_plan_that_cannot_be_loaded_is_told_with_the_first_reason(tmp_path):
    with pytest.raises(QuasarError, match=r"rank0.sm80.engine cannot be loaded: the magic tag does not match; build"):
        open_double(TensorRTDouble(None, SIZES), tmp_path)


def test_passes_of_many_lengths_have_few_shapes(tmp_path):
    sizes = PlanSizes(Limits(max_batch_size=2, max_seq_len=700, max_draft_len=3), prefill_rows=10)
    graph = decoder_graph(real_network(), *MODEL, capacity=sizes.capacity)
    path = tmp_path / "rank0.sm80.engine"
    path.write_bytes(b"plan")
    session = plan_session.PlanSession(TensorRTDouble(graph, sizes), path, CpuDevice(), MODEL[0], sizes, name="long")
    spans = []
    bind = session._bind
    session._bind = lambda name, tensor: (spans.append(int(tensor)) if name == SPAN else None, bind(name, tensor))
    for slot in (0, 1):
        session.clear(slot)
    for past in (0, 252, 253, 508, 509, 700):
        session.run(0, np.zeros((2, 4), np.int32), np.array([past, 0], np.int32), [0])
    assert spans == [256, 256, 512, 512, 704, 704]


# Opening a directory


@pytest.fixture
def engine_dir(tmp_path):
    """An engine directory with plans of four bytes."""
    directory = write_engine_dir(tmp_path / "engine", *MODEL)
    manifest = Manifest.open(directory)
    record = FileRecord(4, *[hashlib.sha256(b"plan").hexdigest()] * 2)
    files = manifest.files | {f"rank0.sm{sm}.engine": record for sm in (80, 89)}
    for name in files.keys() - manifest.files.keys():
        (directory / name).write_bytes(b"plan")
    plan = Plan("tensorrt-rtx", "1.7.1.116", (80, 89), "weight_only", SIZES.prefill_rows)
    dataclasses.replace(manifest, target="tensorrt-rtx", files=files, plan=plan, limits=LIMITS).write(directory)
    return directory


def refusal(directory, engine="auto") -> str:
    with pytest.raises(QuasarError) as error:
        open_engine(directory, engine)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_engine_directory_opens_with_the_plan_of_its_gpu(engine_dir, trt, reference, monkeypatch):
    monkeypatch.setattr(tensorrt, "load_stack", lambda stack: trt)
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda: CpuDevice(sm=89))
    engine = open_engine(engine_dir)
    assert isinstance(engine, TensorRTEngine) and trt.loaded == [b"plan"]
    assert engine.max_seq_len == 48
    assert engine.weight_bytes_per_step == reference.weight_bytes_per_step
    engine.open(), reference.open()
    assert_same_logits(steps(engine, [entry(0, 7)]), steps(reference, [entry(0, 7)]))


def test_a_gpu_without_a_plan_is_refused(engine_dir, trt, monkeypatch):
    monkeypatch.setattr(tensorrt, "load_stack", lambda stack: trt)
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda: CpuDevice(sm=86))
    assert "has plans for SM 80, 89; this GPU, a double, is SM 86: build the engine again with --sm 86" in refusal(
        engine_dir
    )


def test_another_version_of_the_stack_is_refused(engine_dir, trt, monkeypatch):
    monkeypatch.setattr(tensorrt, "load_stack", lambda stack: trt)
    trt.__version__ = "1.8.0.1"
    assert "compiled by tensorrt-rtx 1.7.1.116, 1.8.0.1 is installed" in refusal(engine_dir)


def test_machines_without_cuda_are_told_what_is_missing(engine_dir, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in refusal(engine_dir)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_device.ctypes.util, "find_library", lambda name: None)
    assert "no NVIDIA driver (libcuda) was found" in refusal(engine_dir)
    monkeypatch.setattr(cuda_device.ctypes.util, "find_library", lambda name: "libcuda.so.1")
    assert "the NVIDIA driver shows no GPU" in refusal(engine_dir)


def test_engines_and_directories_that_do_not_fit_are_refused(engine_dir, tmp_path):
    assert "was built for target 'tensorrt-rtx', engine 'cpu' runs target 'cpu'" in refusal(engine_dir, "cpu")
    other = write_engine_dir(tmp_path / "other", *MODEL)
    assert "was built for target 'cpu'; engine 'tensorrt' runs targets tensorrt, tensorrt-rtx" in refusal(
        other, "tensorrt"
    )
    (engine_dir / "rank0.sm89.engine").write_bytes(b"plaN")
    assert "was altered: build the engine again" in refusal(engine_dir)
