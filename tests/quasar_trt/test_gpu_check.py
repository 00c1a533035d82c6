"""The check for machines with a GPU, as far as one without runs it: figures, parts that cannot run, what is saved."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import torch
from plan_double import CpuDevice
from rich.console import Console

from quasar_trt.bench import gpu_kernel_parts
from quasar_trt.bench.curve import CurveTimes
from quasar_trt.bench.gpu_check import run_parts
from quasar_trt.bench.gpu_kernel_parts import QWEN3_8B
from quasar_trt.bench.gpu_kernels import GpuKernelTimes, Sizes, measure
from quasar_trt.bench.gpu_part import NotRun, Outcome
from quasar_trt.bench.options import KernelBenchOptions
from quasar_trt.bench.weight_buffer import layer_of
from quasar_trt.engines import cuda_device
from quasar_trt.plugins import reference
from quasar_trt.tables import FigureTable

TINY = Sizes(rows=4, columns=64, mlp=128, head=16, block=32, linears=((48, 64),), linear_rows=(1, 2), buffers=2048)


def test_every_call_goes_round_buffers_of_the_asked_size():
    counts = []

    def time(calls):
        for call in calls:
            call()
        counts.append(len(calls))
        return [float(len(counts))] * 2

    times = measure(reference, "cpu", time, TINY)
    # 2048 bytes hold 4 inputs, 2 of the MLP, and not one weight.
    assert counts == [*[4] * 5, 2, *[1] * 4]
    assert times.copy == (4 * 4 * 64, [1.0] * 2) and times.read == (2 * 4 * 64, [2.0] * 2)
    moved = {name: nbytes for name, (nbytes, _) in times.quantizing.items()}
    assert moved == {
        "smooth_quantize": 4 * 64 * 3 + 16,
        "smooth_quantize (16)": 4 * 64 * 3 + 16,
        "rms_norm_quantize": 4 * 64 * 3 + 16,
        "silu_mul_smooth_quantize (32)": 4 * 128 * 5 + 16,
    }
    assert times.w8a8 == {(48, 64, 1): [7.0] * 2, (48, 64, 2): [9.0] * 2}
    assert times.bf16 == {(48, 64, 1): [8.0] * 2, (48, 64, 2): [10.0] * 2}


def test_tables_set_kernels_against_the_memory_of_the_same_run():
    times = GpuKernelTimes(
        copy=(4_000_000, [1e-6, 2e-6, 3e-6]),  # 2000 GB/s
        read=(4_000_000, [1e-6] * 3),  # 4000 GB/s
        quantizing={"smooth_quantize": (3_000_000, [2e-6] * 3)},
        w8a8={(1000, 3000, 2): [1e-6, 1e-6, 2e-6]},
        bf16={(1000, 3000, 2): [2e-6, 1e-6, 3e-6]},
    )
    quantizing, linears = times.tables()
    assert quantizing.rows == [("smooth_quantize", "1500", "75%")]
    assert linears.rows == [("1000 x 3000", "2", "3000", "75%", "1.50x (1.00..2.00)")]
    json.dumps(times.to_dict())
    assert times.to_dict()["linears"][0]["bf16_seconds"] == [2e-6, 1e-6, 3e-6]


def test_the_cost_of_a_step_is_that_of_qwen3_8b(monkeypatch):
    assert layer_of(QWEN3_8B) == {4096: 6144 + 4096 + 2 * 12288, 12288: 4096}
    asked = []
    monkeypatch.setattr(gpu_kernel_parts, "need_gpu", lambda: None)
    monkeypatch.setattr(gpu_kernel_parts, "linears_outcome", lambda *arguments: asked.append(arguments))
    gpu_kernel_parts.step_cost()
    assert asked == [(layer_of(QWEN3_8B), KernelBenchOptions())]


def test_linears_are_compared_by_layer(monkeypatch):
    """BF16 weights fill the buffer with half as many layers."""
    monkeypatch.setattr(cuda_device, "CudaDevice", CpuDevice)
    monkeypatch.setattr("quasar_trt.bench.kernels._LEAST_GPU_BUFFER", 16 * 4096)

    def measured(curves, read, read_bytes, repeats):
        return [CurveTimes(each.name, each.weight_bytes, {1: [2.0], 3: [3.0]}, [1e6]) for each in curves]

    monkeypatch.setattr(gpu_kernel_parts, "measure_curves", measured)
    outcome = gpu_kernel_parts.linears_outcome({64: 64}, KernelBenchOptions(rows=(1, 3), repeats=1))
    *_, table = outcome.tables
    assert table.rows == [("1", "2.00x", "2.00x"), ("3", "2.00x", "2.00x")]
    assert json.loads(json.dumps(outcome.figures))["curves"][2]["weight_bytes"] == 16 * 4096


def test_a_part_that_cannot_run_says_why_and_the_others_run():
    def missing():
        raise NotRun("no TensorRT")

    out = io.StringIO()
    parts = {"a": missing, "b": lambda: Outcome({"x": 1}, [FigureTable("title", ("name",), [("row",)])])}
    results, sound = run_parts(parts, Console(file=out, width=80))
    assert results == {"a": {"not_run": "no TensorRT"}, "b": {"figures": {"x": 1}, "failure": ""}}
    assert not sound
    assert out.getvalue().startswith("a: not run, no TensorRT\ntitle\n")


def broken() -> Outcome:
    raise RuntimeError("CUDA error")


@pytest.mark.parametrize(
    ("part", "failure"), [(lambda: Outcome({}, failure="1 failed"), "1 failed"), (broken, "RuntimeError: CUDA error")]
)
def test_a_failure_is_shown_and_makes_the_check_fail(part, failure):
    out = io.StringIO()
    results, sound = run_parts({"a": part, "b": lambda: Outcome({"x": 1})}, Console(file=out))
    assert not sound and f"a: FAILED\n{failure}" in out.getvalue()
    assert results == {"a": {"figures": {}, "failure": failure}, "b": {"figures": {"x": 1}, "failure": ""}}


def check(output):
    command = [sys.executable, "-m", "quasar_trt.bench.gpu_check", str(output), "no model", "no prompts"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_file_that_cannot_be_written_is_one_line_before_anything_runs(tmp_path):
    found = check(tmp_path / "none" / "check.json")
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr == f"error: OUTPUT: directory {tmp_path / 'none'} does not exist\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the check itself runs where a GPU is")
def test_without_a_gpu_every_part_says_so_and_the_file_is_written(tmp_path):
    output = tmp_path / "check.json"
    found = check(output)
    assert found.returncode == 1
    saved = json.loads(output.read_text())
    targets = ("tensorrt-rtx", "tensorrt", "tensorrt-llm")
    assert list(saved["parts"]) == [
        *("kernel tests", "kernel times", "step cost", "reference engine"),
        *(name for target in targets for name in (target, f"{target}, four cells")),
    ]
    assert all("finds no CUDA device" in part["not_run"] for part in saved["parts"].values())
    assert "quasar-trt" in saved["environment"]
