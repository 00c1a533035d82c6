"""Engine directories with plans: what opens, and the one line that each refusal is."""

from __future__ import annotations

import pytest
import torch
from plan_double import TensorRTDouble
from tiny import write_engine_dir
from tiny_plan import MODEL, assert_same_logits, double, entry, install, reference_engine, steps, write_plan_dir

from quasar_trt.engines import cuda_device, open_engine
from quasar_trt.engines.tensorrt import TensorRTEngine
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner


@pytest.fixture
def trt(monkeypatch) -> TensorRTDouble:
    return install(monkeypatch, double())


@pytest.fixture
def engine_dir(tmp_path):
    return write_plan_dir(write_engine_dir(tmp_path / "source", *MODEL), tmp_path / "engine", sms=(80, 89))


def refusal(directory, engine="auto") -> str:
    with pytest.raises(QuasarError) as error:
        open_engine(directory, engine)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_engine_directory_opens_with_the_plan_of_its_gpu(engine_dir, trt):
    trt.device.sm = 89
    engine = open_engine(engine_dir)
    assert isinstance(engine, TensorRTEngine) and trt.loaded == [b"plan 0"]
    reference = reference_engine()
    assert engine.max_seq_len == 48
    assert engine.weight_bytes_per_step == reference.weight_bytes_per_step
    engine.open(), reference.open()
    assert_same_logits(steps(engine, [entry(0, 7)]), steps(reference, [entry(0, 7)]))


def test_a_gpu_without_a_plan_is_refused(engine_dir, trt):
    trt.device.sm = 86
    assert "has plans for SM 80, 89; this GPU, a double, is SM 86: build the engine again with --sm 86" in refusal(
        engine_dir
    )


def test_another_version_of_the_stack_is_refused(engine_dir, trt):
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
    (engine_dir / "rank0.sm89.engine").write_bytes(b"plaN 0")
    assert "was altered: build the engine again" in refusal(engine_dir)


def test_a_plan_that_is_missing_is_told(engine_dir, trt):
    (engine_dir / "rank0.sm80.engine").unlink()
    assert "rank0.sm80.engine" in refusal(engine_dir) and "missing" in refusal(engine_dir)


def test_threads_are_refused(engine_dir, trt):
    with pytest.raises(QuasarError, match="threads is 2; engine 'tensorrt' has no use for it"):
        open_engine(engine_dir, threads=2)


def test_longer_drafts_than_the_plan_was_made_for_are_refused(engine_dir, trt):
    with pytest.raises(
        QuasarError, match=r"num_speculative_tokens is 4; allowed: at most 3, the engine's max_draft_len"
    ):
        Runner.from_dir(engine_dir, "suffix", {"num_speculative_tokens": 4})
