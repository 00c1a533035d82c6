"""The benchmarks on engine directories with plans, on doubles."""

from __future__ import annotations

import json

import pytest
import torch
from plan_double import CpuDevice
from rich.console import Console
from tiny_plan import double_of, install, write_plan_dir

from quasar_trt.bench import cell, run
from quasar_trt.bench.cell import CELLS, CellHere
from quasar_trt.bench.gpu_weight_buffer import GpuWeightBuffer
from quasar_trt.bench.kernels import run_kernel_bench
from quasar_trt.bench.options import BenchOptions, KernelBenchOptions
from quasar_trt.bench.weight_buffer import KINDS
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.plugins import reference
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

QUIET = Console(quiet=True)


@pytest.fixture
def plan_dir(engine_dirs, tmp_path, monkeypatch):
    directory = write_plan_dir(engine_dirs["BF16"], tmp_path / "plan")
    install(monkeypatch, double_of(directory))
    return directory


def test_four_cells_of_plans(plan_dir, monkeypatch):
    monkeypatch.setattr(run, "CellProcess", CellHere)  # where the doubles are
    both = {"BF16": plan_dir, "INT8": plan_dir}
    with pytest.raises(QuasarError, match="holds BF16 weights; --int8 needs INT8"):
        run.run_bench(both, [], BenchOptions(random_prompts=1), QUIET)
    monkeypatch.setattr(run, "_weights", lambda manifest: next(names))
    names = iter(both)
    report = run.run_bench(both, [], BenchOptions(random_prompts=2, max_tokens=5, repeats=1), QUIET)
    assert len(report.runs) == 2 * len(CELLS)
    plain = report.runs[0].measurement
    assert all(each.measurement.token_ids == plain.token_ids for each in report.runs[: len(CELLS)])
    values = json.loads(json.dumps(report.to_dict()))
    assert values["cells"]["BF16 plain"]["weight_bytes_per_step"] == report.weight_bytes[CELLS[0]] > 0
    assert set(values["cells"]["INT8 drafted"]["verify_cost_over_one_row"]) == {"1", "2", "3", "5", "8"}


def test_engines_of_different_targets_are_no_cells_of_one_benchmark(plan_dir, engine_dirs):
    with pytest.raises(QuasarError, match=r"are for targets cpu, tensorrt-rtx; build both for one target"):
        run.run_bench({"BF16": plan_dir, "INT8": engine_dirs["INT8"]}, [], BenchOptions(random_prompts=1), QUIET)


def test_a_cells_process_counts_the_memory_of_the_gpu(plan_dir):
    class Connection:
        def __init__(self):
            self.requests, self.sent = [([1, 2, 3], SamplingParams(max_tokens=2, temperature=0)), None], []
            self.send = self.sent.append

        def recv(self):
            return self.requests.pop(0)

    connection = Connection()
    cell._work(connection, plan_dir, {"drafter": None})
    weight_bytes, measurement, (costs, peak) = connection.sent
    device_bytes = Runner.from_dir(plan_dir).engine.device_bytes
    assert weight_bytes > 0 and len(measurement.token_ids) == 2 and set(costs) == {1, 2, 3, 5, 8}
    assert 0 < device_bytes < peak <= cell.peak_memory() + device_bytes


def test_kernels_of_plans_are_set_against_the_gpus_memory(plan_dir, tmp_path, engine_dirs, monkeypatch):
    monkeypatch.setattr("quasar_trt.bench.kernels._LEAST_GPU_BUFFER", 1 << 18)
    other = write_plan_dir(engine_dirs["BF16"], tmp_path / "other")
    options = KernelBenchOptions(rows=(1, 3), repeats=2)
    report = run_kernel_bench([plan_dir, other], options, QUIET)
    values = json.loads(json.dumps(report.to_dict()))
    names = ["w8a8 linears", "w8a16 linears", "bf16 linears", "plan: step at context 45", "other: step at context 45"]
    assert [curve["name"] for curve in values["curves"]] == names
    assert values["reader"] == "a double" and "by a double;" in report.summary()
    with pytest.raises(QuasarError, match="threads is 1; a GPU has no use for it"):
        run_kernel_bench([plan_dir], KernelBenchOptions(threads=1), QUIET)
    with pytest.raises(QuasarError, match="targets cpu, tensorrt-rtx; allowed: those of a CPU alone, or of a GPU"):
        run_kernel_bench([plan_dir, engine_dirs["BF16"]], options, QUIET)


@pytest.mark.parametrize("kind", KINDS)
def test_linears_on_a_gpu_read_as_many_whole_layers_as_the_buffer_holds(kind, monkeypatch):
    layer = {64: 96, 32: 64}
    buffer = GpuWeightBuffer(layer, 50_000, CpuDevice(), reference)
    assert buffer.nbytes == 50_176  # a multiple of 256
    read = []
    linear = torch.nn.functional.linear if kind == "bf16" else reference.LINEAR[16 if kind == "w8a16" else 8]

    def watched(*arguments):
        x, weight = arguments[0], arguments[-1] if kind == "bf16" else arguments[2]
        assert x.shape == (3, weight.shape[1])
        read.append((weight.data_ptr(), weight.nbytes))
        return linear(*arguments)

    monkeypatch.setattr("torch.nn.functional.linear", watched)
    for name in ("w8a8_linear", "w8a16_linear"):
        monkeypatch.setattr(reference, name, watched)
    curve = buffer.curve(kind, (1, 3))
    values = 96 * 64 + 64 * 32
    size = values * (2 if kind == "bf16" else 1)
    assert curve.weight_bytes == 50_176 // size * size
    curve.run(3)
    first = len(read) // 2  # once to prepare, once to capture
    assert read[:first] == read[first:]
    start = buffer._weights.data_ptr()
    for address, nbytes in read[:first]:
        assert address == start
        start += nbytes
    assert start == buffer._weights.data_ptr() + curve.weight_bytes
    buffer.read()


def test_auto_is_the_engine_of_plans(plan_dir):
    from quasar_trt.engines import engine_of

    assert engine_of(Manifest.open(plan_dir)) == "tensorrt"
