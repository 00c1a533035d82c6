"""`quasar-trt eval fidelity`: the table, the JSON, the picture, and one line for each wrong input."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys

import pytest
from rich.console import Console
from tiny import save_hf, tiny_checkpoint, tiny_llama, write_engine_dir
from tiny_tokenizer import VOCAB_SIZE, save_tokenizer

from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.builders.fidelity import measure
from quasar_trt.builders.progress import Stages
from quasar_trt.builders.source import open_source
from quasar_trt.cli import main
from quasar_trt.errors import QuasarError
from quasar_trt.fidelity_report import FIGURES, read_fidelity, show
from quasar_trt.manifest import Manifest
from quasar_trt.recipe import Recipe
from quasar_trt.tokenizer import encode, load_tokenizer

MAX_SEQ_LEN = 256


@pytest.fixture(scope="module")
def engine(hf_dir, tmp_path_factory):
    """An INT8 engine of the model in `hf_dir`, which its manifest names; read-only for tests."""
    directory = tmp_path_factory.mktemp("engine") / "int8"
    config, recipe, tensors = tiny_checkpoint(0, Recipe("int8", smoothquant=0.5), vocab_size=VOCAB_SIZE)
    write_engine_dir(directory, config, recipe, tensors, MAX_SEQ_LEN)
    compile_cpu(config, recipe, tensors, directory / "rank0.engine")
    save_tokenizer(directory)
    source = {"path": str(hf_dir), "kind": "huggingface", "notices": []}
    rewrite(directory, source=source, calibration={"clamped_channels": 3})
    return directory


def rewrite(directory, **fields):
    dataclasses.replace(Manifest.open(directory), **fields).write(directory)


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls the command line in this process; gives exit code, stdout, stderr."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["quasar-trt", "eval", *map(str, args)])
        monkeypatch.setenv("COLUMNS", "100")
        capsys.readouterr()  # what the test itself has made others print
        code = 0
        try:
            main()
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return call


def test_the_report_is_printed_and_saved(engine, hf_dir, run, tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 10)
    before = contents(engine)
    options = ["--text", text, "--tokens", 300, "--window", 128, "--output", output, "--threads", 1]
    code, shown, _ = run("fidelity", engine, *options)
    assert code == 0
    assert contents(engine) == before
    report = json.loads(output.read_text())
    assert report["engine"] == str(engine) and report["source"] == str(hf_dir)
    assert report["text"] == f"3 windows of at most 128 tokens, {text}"
    assert report["tokens"] == 300
    ids = encode(load_tokenizer(engine), text.read_text())[:300]
    windows = [ids[:128], ids[128:256], ids[256:]]
    direct = measure(open_source(str(hf_dir)), engine, windows, str(text), threads=1, stages=Stages(False))
    assert {name: report[name] for name in direct} == direct
    assert max(map(len, shown.splitlines())) <= 100 and len(shown.splitlines()) <= 15
    worst = max(range(3), key=lambda i: report["layer_errors"][i])
    for part in (
        f"{report['kl']:.3g} +- {report['kl_standard_error']:.2g} nats",
        f"99th percentile {report['kl_p99']:.3g}",
        f"{report['top1_agreement']:.2%} +- {report['top1_standard_error']:.2%}",
        f"source {report['source_perplexity']:.5g}, engine {report['engine_perplexity']:.5g}",
        f"worst layers        {worst} ({report['layer_errors'][worst]:.2%})",
        "clamped channels    3",
    ):
        assert part in shown


def test_a_model_named_by_hand_and_the_package_s_own_text(engine, hf_dir, run, tmp_path):
    moved = tmp_path / "engine"
    shutil.copytree(engine, moved)
    rewrite(moved, source={"path": "/gone", "kind": "huggingface", "notices": []})
    code, shown, _ = run("fidelity", moved, "--against", hf_dir, "--tokens", 60)
    assert code == 0 and "1 windows of at most 60 tokens, the package's own text" in shown
    code, shown, errors = run("fidelity", moved, "--tokens", 60)
    assert (code, shown, errors.count("\n")) == (1, "", 1)
    assert "model that the engine was built from" in errors and "/gone" in errors and "--against" in errors


def test_an_engine_without_a_tokenizer_reads_random_ids(engine, run, tmp_path):
    bare = tmp_path / "engine"
    shutil.copytree(engine, bare)
    (bare / "tokenizer.json").unlink()
    code, shown, _ = run("fidelity", bare, "--tokens", 40)
    assert code == 0 and "random token ids" in shown
    code, _, errors = run("fidelity", bare, "--text", tmp_path / "text.txt")
    assert code == 1 and "this engine has none" in errors


def test_the_picture_is_a_png(engine, run, tmp_path):
    picture = tmp_path / "layers.png"
    assert run("fidelity", engine, "--tokens", 20, "--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and picture.stat().st_size > 5000


def test_a_picture_without_matplotlib_is_refused_before_the_work(engine, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("quasar_trt.builders.evaluate.measure", None)
    code, shown, errors = run("fidelity", engine, "--plot", tmp_path / "layers.png")
    assert (code, shown, errors) == (
        1,
        "",
        "error: --plot needs matplotlib, which is missing; pip install 'quasar-trt[plot]'\n",
    )


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["/does/not/exist"], ["/does/not/exist", "quasar-trt build"]),
        (["ENGINE", "--against", "/does/not/exist"], ["/does/not/exist"]),
        (["ENGINE", "--text", "/does/not/exist"], ["cannot read text /does/not/exist"]),
        (["ENGINE", "--tokens", "100000000"], ["own text has", "100000000 are needed"]),
        (["ENGINE", "--tokens", "1"], ["--tokens"]),
        (["ENGINE", "--window", "257"], ["window is 257; this engine allows 2 to 256"]),
        (["ENGINE", "--threads", "0"], ["--threads"]),
        (["ENGINE", "--output", "/does/not/exist/report.json"], ["--output", "/does/not/exist"]),
        (["ENGINE", "--output", "ENGINE/fidelity.json"], ["--output", "lies in the engine directory"]),
        (["ENGINE", "--plot", "/does/not/exist/layers.png"], ["--plot", "/does/not/exist"]),
        (["ENGINE", "--plot", "ENGINE/layers.png"], ["--plot", "lies in the engine directory"]),
        (["ENGINE", "--plot", "layers.svg"], ["layers.svg", "ends in .png"]),
        ([], ["ENGINE_DIR is missing"]),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_before_any_work(args, parts, engine, run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quasar_trt.builders.evaluate.measure", None)
    code, shown, errors = run("fidelity", *(arg.replace("ENGINE", str(engine)) for arg in args))
    assert (code, shown) == (1, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1
    for part in parts:
        assert part in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_hidden_layers": 2}, "its num_hidden_layers is 2, the engine's 3"),
        ({"rms_norm_eps": 1e-6}, "its norm_epsilon is 1e-06, the engine's 1e-05"),
        ({"rope_theta": 5e5}, "its rotary embeddings differ from the engine's"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_model_is_refused_by_its_first_difference(overrides, message, engine, run, tmp_path):
    other = save_hf(tiny_llama(vocab_size=VOCAB_SIZE, **overrides), tmp_path / "other")
    code, _, errors = run("fidelity", engine, "--against", other)
    assert code == 1 and errors.count("\n") == 1
    assert f"{other} is another model than the engine's" in errors and message in errors


def test_an_unknown_evaluation_is_one_line(run):
    assert run("fidelty") == (1, "", "error: unknown command 'fidelty'; one of: fidelity; did you mean 'fidelity'?\n")


def test_no_evaluation_shows_help(run):
    code, shown, _ = run()
    assert code == 0 and shown.startswith("Usage: quasar-trt eval ") and "\n  fidelity " in shown


def test_help_names_every_option_in_100_columns(run):
    code, shown, _ = run("fidelity", "--help")
    assert code == 0 and max(map(len, shown.splitlines())) <= 100
    for option in (
        "--against MODEL",
        "--text FILE",
        "--tokens",
        "--window",
        "--plot FILE.png",
        "--output",
        "--threads",
    ):
        assert option in shown


MEASURED = dict.fromkeys(FIGURES, 0.5) | {"layer_errors": [0.1, 0.3, 0.2, 0.05, 0.4, 0.01], "text": "some"}


def shown_of(measured, **options):
    out = io.StringIO()
    show(measured, Console(file=out, width=100), **options)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def test_the_five_worst_layers_come_in_order():
    assert "worst layers        4 (40.00%), 1 (30.00%), 2 (20.00%), 0 (10.00%), 3 (5.00%)\n" in shown_of(MEASURED)


def test_the_smoothing_of_each_kind_of_group_is_one_line():
    group = {"alpha": 0.6, "statistic": "3rms", "error": 0.01}
    groups = {f"transformer.layers.{i}.attention.qkv": group | {"alpha": 0.5 + i / 10} for i in range(3)}
    groups |= {f"transformer.layers.{i}.mlp.proj": group | {"statistic": "p99" if i else "max"} for i in range(3)}
    shown = shown_of(MEASURED | {"groups": groups})
    assert "attention.qkv       alpha 0.6 (0.5 to 0.7), 3rms 3\n" in shown
    assert "mlp.proj            alpha 0.6 (0.6 to 0.6), p99 2, max 1\n" in shown
    assert "clamped" not in shown
    assert len(shown.splitlines()) == 9


def test_an_engine_that_was_not_measured_says_how_to():
    assert "not measured  quasar-trt eval fidelity ENGINE_DIR does" in shown_of({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_p99": None}, "kl_p99 is None"),
        ({"top1_agreement": "0.9"}, "top1_agreement is '0.9'"),
        ({"layer_errors": []}, "layer_errors"),
        ({"layer_errors": [0.1, "0.2"]}, "layer_errors"),
        ({"text": 5}, "text is 5"),
        ({"groups": {"a": {"alpha": 0.5, "error": 0.1}}}, "a group without"),
        ({"groups": [1]}, "a group without"),
    ],
)
def test_a_damaged_report_is_one_line(changes, message, tmp_path):
    path = tmp_path / "fidelity.json"
    path.write_text(json.dumps(MEASURED))
    assert read_fidelity(path) == MEASURED
    path.write_text(json.dumps(MEASURED | changes))
    with pytest.raises(QuasarError, match=rf"fidelity\.json is damaged: {message}") as caught:
        read_fidelity(path)
    assert "\n" not in str(caught.value)
