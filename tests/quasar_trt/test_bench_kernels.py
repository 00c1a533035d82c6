"""The benchmark of kernels: what is read, what is timed, the arithmetic of the roofline, and a run on tiny engines."""

from __future__ import annotations

import io
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from stubs import StubEngine, one_hot_logits

from quasar_trt.bench.curve import Curve, CurveTimes, measure
from quasar_trt.bench.kernel_report import EngineTimes, KernelReport
from quasar_trt.bench.kernels import engine_curves, run_kernel_bench
from quasar_trt.bench.options import KernelBenchOptions
from quasar_trt.bench.scratch_sequence import ScratchSequence
from quasar_trt.bench.weight_buffer import KINDS, WeightBuffer, layer_bytes, layer_of
from quasar_trt.errors import QuasarError
from quasar_trt.machine import last_level_cache
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins import native

needs_native = pytest.mark.skipif(bool(native.UNAVAILABLE), reason=native.UNAVAILABLE or "")


# --- reading memory


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 7, 64, 4099])
def test_probe_reads_every_word(size, threads):
    words = np.random.default_rng(size).integers(0, 2**64, size, dtype=np.uint64)
    assert native.sum_words(words, native.thread_pool(threads)) == sum(map(int, words)) % 2**64


@needs_native
def test_bandwidth_is_the_size_of_the_buffer_over_positive_seconds():
    buffer = WeightBuffer({64: 64}, 1 << 20, native.thread_pool(1))
    assert buffer.nbytes == 1 << 20
    assert buffer.read() == int(buffer._weights.view(np.uint64).sum(dtype=np.uint64))
    (times,) = measure([Curve("read", buffer.nbytes, (1,), lambda rows: buffer.read())], buffer.read, buffer.nbytes, 2)
    assert all(0 < value < np.inf for value in times.bandwidth)


def test_last_level_cache_adds_up_what_the_cpus_do_not_share(tmp_path, monkeypatch):
    """Four CPUs; each two share a third level of 32 MiB."""
    for cpu in range(4):
        for index, (level, shared, size) in enumerate([("1", f"{cpu}", "48K"), ("3", f"{cpu // 2}", "32768K")]):
            directory = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            directory.mkdir(parents=True)
            for name, value in {"level": level, "shared_cpu_list": shared, "size": size}.items():
                (directory / name).write_text(f"{value}\n")
    monkeypatch.setattr("quasar_trt.machine.Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert last_level_cache() == 64 << 20
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert last_level_cache() == 32 << 20
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 9}, raising=False)
    assert last_level_cache() == 0


# --- what is timed


class Clock:
    """Stands still but for what is added."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_everything_runs_once_untimed_and_once_timed_in_every_repeat():
    clock, calls, advanced = Clock(), [], []

    def run(name: str, seconds: float):
        def one(rows: int = 0) -> None:
            calls.append((name, rows))
            clock.pass_by(seconds * len(calls))  # later calls are slower, so that no two times are equal

        return one

    curves = [Curve("a", 100, (1, 2), run("a", 0.001)), Curve("b", 300, (1,), run("b", 0.01))]
    a, b = measure(curves, run("read", 0.1), 5000, 2, lambda: advanced.append(None), clock)
    once = [("read", 0)] * 2 + [("a", 1)] * 2 + [("a", 2)] * 2 + [("read", 0)] * 2 + [("b", 1)] * 2
    assert calls == once * 2 and len(advanced) == 6
    assert a.seconds == {1: pytest.approx([0.004, 0.014]), 2: pytest.approx([0.006, 0.016])}
    assert b.seconds == {1: pytest.approx([0.1, 0.2])}
    assert a.bandwidth == pytest.approx([5000 / 0.2, 5000 / 1.2]) and b.bandwidth == pytest.approx([6250, 5000 / 1.8])


def test_arithmetic_of_a_curve():
    curve = CurveTimes("c", 1000, {1: [1.0, 2.0], 4: [1.5, 2.5]}, [2000.0, 1000.0])
    assert curve.relative(1) == [1.0, 1.0] and curve.relative(4) == [1.5, 1.25]
    assert curve.rates(4) == pytest.approx([1000 / 1.5, 400])
    assert curve.shares(1) == [0.5, 0.5] and curve.shares(4) == pytest.approx([1 / 3, 0.4])


def stub(**options) -> StubEngine:
    return StubEngine(lambda prefix: one_hot_logits(0, 4), vocab=4, weight_bytes_per_step=7, **options)


def test_scratch_sequence_is_filled_by_chunks_and_stays_as_it_was():
    engine = stub(max_rows=50)
    sequence = ScratchSequence(engine, 120)
    assert [len(step.tokens[0]) for step in engine.passes] == [50, 50, 20]
    sequence.verify(3)
    sequence.prefill(50)
    sequence.verify(1)
    assert [step.positions[0] for step in engine.passes[3:]] == [range(120, 123), range(120, 170), range(120, 121)]
    assert [step.needs_logits for step in engine.passes[3:]] == [[True], [False], [True]]
    sequence.close()
    assert engine.caches == {}


def test_curves_of_an_engine():
    engine = stub(max_seq_len=4200, max_rows=64)
    with ExitStack() as stack:
        verify, prefill, long = engine_curves("e", engine, (1, 2, 8), stack)
        assert (verify.rows, prefill.rows, long.rows) == ((1, 2, 8), (64,), (1,))
        assert verify.weight_bytes == 7 and verify.name == "e: step at context 128"
        filled = len(engine.passes)
        verify.run(8)
        prefill.run(64)
        long.run(1)
        assert [step.positions[0] for step in engine.passes[filled:]] == [
            range(128, 136),
            range(64),
            range(4096, 4097),
        ]
    assert engine.caches == {}


def test_short_sequences_shorten_the_context_and_leave_out_the_long_one():
    engine = stub(max_seq_len=32, max_rows=64)
    with ExitStack() as stack:
        verify, prefill, long = engine_curves("e", engine, (1, 8), stack)
        verify.run(8)
        assert engine.passes[-1].positions == [range(24, 32)]
        assert prefill.rows == (32,) and long is None
        with pytest.raises(QuasarError, match=r"rows are 1,32; engine e allows 31"):
            engine_curves("e", engine, (1, 32), stack)


# --- the linears

CONFIG = ModelConfig("LlamaForCausalLM", 48, 80, 3, 6, 2, 16, 131, 512, 1e-5, 1e4)


def test_layer_holds_every_linear_by_its_columns():
    """qkv [160, 48], dense [48, 96], gate and up [80, 48] each, down [48, 80]."""
    assert layer_of(CONFIG) == {48: 160 + 80 + 80, 96: 48, 80: 48}
    assert layer_bytes(layer_of(CONFIG), quantized=True) == 320 * 48 + 48 * 96 + 48 * 80
    assert layer_bytes(layer_of(CONFIG), quantized=False) == 2 * layer_bytes(layer_of(CONFIG), quantized=True)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_linears_read_as_many_whole_layers_as_the_buffer_holds(kind, monkeypatch):
    monkeypatch.setattr("quasar_trt.bench.weight_buffer._PIECE", 50_000)  # several pieces per width
    buffer = WeightBuffer(layer_of(CONFIG), 300_000, native.thread_pool(2))
    size = layer_bytes(layer_of(CONFIG), quantized=kind != "bf16")
    curve = buffer.curve(kind, (1, 3))
    assert curve.weight_bytes == 300_000 // size * size
    read = []
    linear = native.packed_linear

    def watched(kind, x, scale, weight, weight_scale, k, pool):
        y = linear(kind, x, scale, weight, weight_scale, k, pool)
        assert x.shape == (3, -(-k // 16) * 16) and y.shape == (3, len(weight) * 16)
        read.append((weight.ctypes.data, weight.nbytes))
        return y

    monkeypatch.setattr(native, "packed_linear", watched)
    curve.run(3)
    start = buffer._weights.ctypes.data
    assert start % 64 == 0
    for address, nbytes in read:  # one after the other, nothing twice
        assert address == start
        start += nbytes
    assert start == buffer._weights.ctypes.data + curve.weight_bytes and len(read) > 3


@needs_native
@pytest.mark.parametrize("threads", [None, 1, 3])
def test_packed_linears_on_a_pool_give_the_values_of_the_linear(threads):
    from quasar_trt.plugins.packing import pack_weight

    generator = np.random.default_rng(0)
    q, weight = generator.integers(-127, 128, (3, 48), np.int8), generator.integers(-127, 128, (160, 48), np.int8)
    scale, weight_scale = generator.random(3, np.float32), generator.random(160, np.float32)
    pool = threads and native.thread_pool(threads)
    y = native.packed_linear("w8a8", q, scale, pack_weight(weight), weight_scale, 48, pool)
    np.testing.assert_array_equal(y, native.w8a8_linear(q, scale, weight, weight_scale))
    floats, bits = generator.normal(size=(3, 48)).astype(np.float32), weight.astype(np.uint16) + 0x3F00
    y = native.packed_linear("bf16", floats, None, pack_weight(bits), None, 48, pool)
    np.testing.assert_array_equal(y, native.bf16_linear(floats, bits))


# --- the report


def known_report() -> KernelReport:
    """Read bandwidth 10 GB/s; an INT8 engine of 100 MB and a BF16 engine of 200 MB."""

    def curve(name: str, weight_bytes: float, seconds: dict) -> CurveTimes:
        return CurveTimes(name, int(weight_bytes), seconds, [10e9, 8e9])

    int8 = curve("int8: step", 100e6, {1: [0.0125, 0.0125], 5: [0.015, 0.0125]})
    bf16 = curve("bf16: step", 200e6, {1: [0.025, 0.025], 5: [0.0285, 0.0225]})
    return KernelReport(
        options=KernelBenchOptions(rows=(1, 5), repeats=2),
        reader="2 threads",
        last_level_cache=32 << 20,
        buffer_bytes=256 << 20,
        layer={576: 4608, 1536: 576},
        linears=(curve("w8a8 linears", 250e6, {1: [0.05, 0.03125], 5: [0.06, 0.0625]}),),
        engines=(
            EngineTimes(Path("x/int8"), True, int8, curve("p", 1, {256: [0.125, 0.25]}), None),
            EngineTimes(
                Path("x/bf16"), False, bf16, curve("p", 1, {256: [0.5, 0.5]}), curve("l", 1, {1: [0.0375, 0.05]})
            ),
        ),
    )


def test_figures_of_a_known_run():
    report = known_report()
    int8, bf16 = report.engines
    assert int8.prefill_over_decode == pytest.approx([25.6, 12.8]) and int8.long_over_short_context == []
    assert bf16.prefill_over_decode == pytest.approx([12.8, 12.8])
    assert bf16.long_over_short_context == pytest.approx([1.5, 2.0])
    assert report.pairs == [(bf16, int8)]
    values = json.loads(json.dumps(report.to_dict()))
    assert values["read_bandwidth"] == {"best": 10e9, "median": 9e9}
    linears = values["curves"][0]
    assert linears["share"] == {"1": pytest.approx((0.5 + 1.0) / 2), "5": pytest.approx((250 / 600 + 0.5) / 2)}
    assert linears["relative_time"] == {"1": 1.0, "5": pytest.approx(1.6)}
    (pair,) = values["bf16_over_int8"]
    assert pair["weight_bytes"] == 2 and pair["seconds"] == {"1": [2.0, 2.0], "5": pytest.approx([1.9, 1.8])}


def test_tables_of_a_known_run():
    report = known_report()
    tables = {table.title: [list(row) for row in table.rows] for table in report.tables()}
    assert tables == {
        "w8a8 linears, 250 MB of weights": [
            ["1", "1.00x", "6.5", "8.0", "75% (50..100)"],
            ["5", "1.60x (1.20..2.00)", "4.1", "4.2", "46% (42..50)"],
        ],
        "int8: step, 100 MB of weights": [
            ["1", "1.00x", "8.0", "8.0", "90% (80..100)"],
            ["5", "1.10x (1.00..1.20)", "7.3", "8.0", "83% (67..100)"],
        ],
        "bf16: step, 200 MB of weights": [
            ["1", "1.00x", "8.0", "8.0", "90% (80..100)"],
            ["5", "1.02x (0.90..1.14)", "8.0", "8.9", "91% (70..111)"],
        ],
        "bf16 over int8: 2.00x the bytes of weights": [
            ["1", "2.00x (2.00..2.00)", "100%"],
            ["5", "1.85x (1.80..1.90)", "92%"],
        ],
        "other passes": [
            ["int8", "19.2x (12.8..25.6)", "-"],
            ["bf16", "12.8x (12.8..12.8)", "1.75x (1.50..2.00)"],
        ],
    }
    assert report.summary().startswith(
        "Read bandwidth 9.0 GB/s (median, best 10.0) by 2 threads; last-level cache 32 MiB"
    )
    console = Console(width=80, file=io.StringIO())
    for table in report.tables():
        console.print(table.terminal())
    assert max(map(len, console.file.getvalue().splitlines())) <= 80 and "…" not in console.file.getvalue()


# --- a run


def test_options_of_the_kernel_bench_are_checked():
    assert KernelBenchOptions(rows=(4, 1, 4)).rows == (1, 4)
    for rows in ((), (2, 3), (0, 1), (1, 257)):
        with pytest.raises(QuasarError, match="allowed: 1, and others up to 256"):
            KernelBenchOptions(rows=rows)
    with pytest.raises(QuasarError, match="repeats is 0"):
        KernelBenchOptions(repeats=0)


@needs_native
def test_kernel_bench_of_tiny_engines(engine_dirs, monkeypatch):
    monkeypatch.setattr("quasar_trt.bench.kernels._LEAST_BUFFER", 1 << 20)
    monkeypatch.setattr("quasar_trt.bench.kernels.last_level_cache", lambda: 0)
    options = KernelBenchOptions(rows=(1, 3), repeats=2, threads=1)
    report = run_kernel_bench([engine_dirs["INT8"], engine_dirs["BF16"]], options, Console(quiet=True))
    values = json.loads(json.dumps(report.to_dict()))
    names = ["w8a8 linears", "w8a16 linears", "bf16 linears", "int8: step at context 128", "bf16: step at context 128"]
    assert [curve["name"] for curve in values["curves"]] == names
    for curve in values["curves"]:
        assert [len(times) for times in curve["seconds"].values()] == [2, 2]
        assert all(0 < share < np.inf for share in curve["share"].values())
    assert {name: engine["weights"] for name, engine in values["engines"].items()} == {"int8": "INT8", "bf16": "BF16"}
    assert values["bf16_over_int8"][0]["weight_bytes"] > 1
    assert "unknown" in report.summary()


@needs_native
def test_engines_of_one_name_are_refused(engine_dirs):
    with pytest.raises(QuasarError, match="directories of different names"):
        run_kernel_bench([engine_dirs["INT8"]] * 2, KernelBenchOptions(), Console(quiet=True))


@needs_native
def test_more_threads_than_the_system_gives_are_refused(monkeypatch):
    def refuse(threads):
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(native, "thread_pool", refuse)
    with pytest.raises(QuasarError, match=r"cannot start 3 threads .*; ask for fewer with --threads"):
        run_kernel_bench([], KernelBenchOptions(threads=3), Console(quiet=True))


def test_kernel_bench_needs_the_native_extension(monkeypatch):
    monkeypatch.setattr(native, "UNAVAILABLE", "it was not built")
    with pytest.raises(QuasarError, match="cannot be measured: it was not built"):
        run_kernel_bench([], KernelBenchOptions(), Console(quiet=True))
