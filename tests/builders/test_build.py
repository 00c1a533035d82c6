"""From a model to an engine directory: what it holds, and that it appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import checkpoint_tensors, random_ids, save_hf, tiny_llama
from tiny_gguf import write_gguf
from tiny_tokenizer import save_tokenizer

from quasar_trt.builders import build as build_module
from quasar_trt.builders import self_text
from quasar_trt.builders.build import _appearing_whole, build
from quasar_trt.checkpoint import Checkpoint, checkpoint_spec
from quasar_trt.engines import open_engine
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel, load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.recipe import Recipe

QUIET = {"progress": False}
QUICK = QUIET | {"calib_size": 4, "calib_max_seq_length": 32}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = save_hf(tiny_llama(0, vocab_size=257), tmp_path_factory.mktemp("model"))
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def engine_dir(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines") / "deep" / "int8"
    build(str(model_dir), directory, Recipe(), **QUICK)
    return directory


def refusal(*arguments, **options) -> str:
    with pytest.raises(QuasarError) as error:
        build(*arguments, **QUICK | options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_directory_holds_everything(engine_dir):
    names = sorted(path.relative_to(engine_dir).as_posix() for path in engine_dir.rglob("*") if path.is_file())
    assert names == [
        "chat_template.jinja",
        "checkpoint/config.json",
        "checkpoint/rank0.safetensors",
        "config.json",
        "fidelity.json",
        "generation_config.json",
        "rank0.engine",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in engine_dir.parent.iterdir()] == ["int8"]
    manifest = Manifest.open(engine_dir)
    manifest.verify(engine_dir)
    assert manifest.recipe == Recipe()
    assert manifest.limits.max_seq_len == 512
    calibration = {key: manifest.calibration[key] for key in ("source", "samples", "tokens", "seed")}
    assert calibration == {"source": "self-generated", "samples": 4, "tokens": 128, "seed": 0}
    checkpoint = Checkpoint.open(engine_dir / "checkpoint")
    assert load_tensors(checkpoint.paths[0]).keys() == checkpoint_spec(checkpoint.config, Recipe()).keys()
    fidelity = json.loads((engine_dir / "fidelity.json").read_text())
    assert fidelity["tokens"] == 8 * 128
    assert 0 < fidelity["kl"] < 0.05
    assert fidelity["top1_agreement"] > 0.9
    assert "seed 1000003" in fidelity["text"]


def test_the_unquantized_engine_is_the_source(model_dir, tmp_path):
    manifest = build(str(model_dir), tmp_path / "bf16", Recipe("none"), **QUIET)
    assert manifest.calibration is None
    config, tensors = checkpoint_tensors(tiny_llama(0, vocab_size=257))
    written = load_tensors(tmp_path / "bf16" / "checkpoint" / "rank0.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    ids = random_ids(config, 20)
    engine = ReferenceEngine.from_dir(tmp_path / "bf16")
    assert torch.equal(engine.model(ids), ReferenceModel(config, Recipe("none"), tensors)(ids))
    assert json.loads((tmp_path / "bf16" / "fidelity.json").read_text())["kl"] < 1e-3


def test_a_quantized_head_is_stored_per_row(model_dir, tmp_path):
    build(str(model_dir), tmp_path / "out", Recipe(quantize_lm_head=True), **QUICK)
    tensors = load_tensors(tmp_path / "out" / "checkpoint" / "rank0.safetensors")
    head = checkpoint_tensors(tiny_llama(0, vocab_size=257))[1]["lm_head.weight"].float()
    restored = tensors["lm_head.weight"].float() * tensors["lm_head.per_channel_scale"].T
    assert tensors["lm_head.weight"].dtype == torch.int8
    assert ((restored - head).abs() <= tensors["lm_head.per_channel_scale"].T * 0.50001).all()
    assert (
        json.loads((tmp_path / "out" / "checkpoint" / "config.json").read_text())["architecture"] != "LlamaForCausalLM"
    )


def test_the_same_seed_gives_the_same_bytes(model_dir, engine_dir, tmp_path):
    first = Manifest.open(engine_dir)
    assert build(str(model_dir), tmp_path / "same", Recipe(), **QUICK) == first
    other = build(str(model_dir), tmp_path / "other", Recipe(), seed=1, **QUICK)
    assert other.files["rank0.engine"].sha256 != first.files["rank0.engine"].sha256


def test_a_source_without_a_tokenizer_builds_and_says_so(tmp_path):
    directory = save_hf(tiny_llama(3), tmp_path / "model")
    manifest = build(str(directory), tmp_path / "out", Recipe(), **QUICK)
    assert any("no tokenizer" in notice for notice in manifest.source["notices"])
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    (tmp_path / "a.txt").write_text("text\n")
    assert "needs a tokenizer" in refusal(str(directory), tmp_path / "x", Recipe(), calib_dataset=tmp_path / "a.txt")


def test_a_gguf_file_builds(tmp_path):
    model = tiny_llama(4, vocab_size=260, hidden_size=96, intermediate_size=64, num_hidden_layers=2)
    path = write_gguf(tmp_path / "m.gguf", model, block_type="Q8_0")
    manifest = build(str(path), tmp_path / "out", Recipe(), **QUICK)
    assert manifest.source["kind"] == "gguf"
    assert manifest.source["notices"] == ["dequantized tensors: 16 Q8_0; the source model is what they hold"]
    engine = open_engine(tmp_path / "out")
    assert engine.config.hidden_size == 96


def test_a_short_calibration_file_is_used_and_noted(model_dir, tmp_path, capsys):
    data = tmp_path / "texts.txt"
    data.write_text("first text\n\nsecond one\n" + "long " * 100 + "\n")
    options = QUICK | {"calib_size": 128, "calib_dataset": data}
    manifest = build(str(model_dir), tmp_path / "out", Recipe(), **options)
    assert manifest.calibration["source"] == str(data)
    assert (manifest.calibration["samples"], manifest.calibration["tokens"]) == (3, 10 + 10 + 32)
    assert any("3 usable texts, 128 were requested" in notice for notice in manifest.source["notices"])
    assert "3 usable texts" in capsys.readouterr().err
    assert build(str(model_dir), tmp_path / "again", Recipe(), **options).files == manifest.files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"calib_size": 0}, ["calib_size is 0", "at least 1"]),
        ({"seed": -1}, ["seed is -1", "at least 0"]),
        ({"calib_max_seq_length": 0}, ["calib_max_seq_length is 0"]),
        ({"max_batch_size": 0}, ["max_batch_size is 0"]),
        ({"max_draft_len": -1}, ["max_draft_len is -1"]),
        ({"max_seq_len": 1000}, ["max_seq_len is 1000", "2 to 512"]),
        ({"calib_dataset": "missing.txt"}, ["cannot read calibration file missing.txt"]),
    ],
)
def test_bad_options_are_refused_and_leave_nothing(model_dir, tmp_path, options, words):
    message = refusal(str(model_dir), tmp_path / "out", Recipe(), **options)
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option",
    [{"calib_dataset": "a.txt"}, {"calib_size": 16}, {"calib_max_seq_length": 256}],
    ids=lambda o: next(iter(o)),
)
def test_calibration_options_without_quantization_are_refused(tmp_path, option):
    with pytest.raises(QuasarError, match=f"{next(iter(option))} has no use with quantization 'none'"):
        build("anything", tmp_path / "o", Recipe("none"), **QUIET, **option)


def test_calibration_text_without_tokens_is_refused(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("quasar_trt.builders.calibrate.encode", lambda tokenizer, text: [])
    (tmp_path / "a.txt").write_text("text\n")
    message = refusal(str(model_dir), tmp_path / "o", Recipe(), calib_dataset=tmp_path / "a.txt")
    assert "a.txt encode to no tokens" in message
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value):
    model = tiny_llama(0)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    directory = save_hf(model, tmp_path / "model")
    assert "model.layers.1.mlp.up_proj.weight" in refusal(str(directory), tmp_path / "o", Recipe())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        (Recipe(), "output of transformer.layers.0.mlp.proj"),
        (Recipe(smoothquant=0.5), "input of transformer.layers.1.attention.qkv"),
        (Recipe("none"), "fidelity"),
    ],
)
def test_a_model_that_overflows_is_refused(tmp_path, recipe, word):
    model = tiny_llama(0)
    for layer in model.model.layers[:2]:
        layer.mlp.down_proj.weight.data.fill_(3e38)
    directory = save_hf(model, tmp_path / "model")
    options = QUICK if recipe.quantized else QUIET
    with pytest.raises(QuasarError, match=word):
        build(str(directory), tmp_path / "o", recipe, **options)
    assert not (tmp_path / "o").exists()


def test_the_temporary_engine_lies_beside_the_output(model_dir, tmp_path, monkeypatch):
    seen = []
    original = self_text.compile_cpu

    def compile_cpu(config, recipe, tensors, path, *more):
        seen.append(path)
        return original(config, recipe, tensors, path, *more)

    monkeypatch.setattr(self_text, "default_engine", lambda: "cpu")
    monkeypatch.setattr(self_text, "compile_cpu", compile_cpu)
    build(str(model_dir), tmp_path / "o", Recipe("none"), **QUIET)
    assert tmp_path in seen[0].parents


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("stage", ["convert", "write_checkpoint", "compile_cpu", "open_engine"])
def test_nothing_is_left_after_a_failure(model_dir, tmp_path, monkeypatch, stage, failure):
    def fail(*arguments, **options):
        raise failure("stop")

    monkeypatch.setattr(build_module, stage, fail)
    with pytest.raises(failure):
        build(str(model_dir), tmp_path / "out", Recipe(), **QUICK)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "open_source", lambda model: pytest.fail("the source was opened"))
    (tmp_path / "out").mkdir()
    assert "--force" in refusal("anything", tmp_path / "out", Recipe())
    (tmp_path / "out" / "precious.txt").write_text("keep")
    assert "is not an engine directory" in refusal("anything", tmp_path / "out", Recipe(), force=True)
    (tmp_path / "file").write_text("keep")
    assert "is not a directory" in refusal("anything", tmp_path / "file", Recipe(), force=True)
    assert (tmp_path / "out" / "precious.txt").read_text() == "keep"


def test_force_replaces_an_engine_only_with_a_whole_one(model_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = build(str(model_dir), out, Recipe(), **QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "compile_cpu", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(str(model_dir), out, Recipe("none"), force=True, **QUIET)
    assert Manifest.open(out) == first
    second = build(str(model_dir), out, Recipe("none"), force=True, **QUIET)
    assert Manifest.open(out) == second != first
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def old_engine(tmp_path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank0.engine").write_text("old")
    return out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupt_between_the_renames_puts_the_old_engine_back(tmp_path, monkeypatch, error):
    out = old_engine(tmp_path)
    original = Path.rename

    def rename(path, target):
        if path.name == "new":
            raise error
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((KeyboardInterrupt, QuasarError)), _appearing_whole(out, force=True):
        pass
    assert (out / "rank0.engine").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_old_engine_that_cannot_be_put_back_is_kept_and_named(tmp_path, monkeypatch):
    out = old_engine(tmp_path)
    original = Path.rename

    def rename(path, target):
        if target == out:
            raise PermissionError(1, "Operation not permitted")
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(QuasarError) as error, _appearing_whole(out, force=True):
        pass
    kept = next(tmp_path.glob(".out.*/replaced"))
    assert (kept / "rank0.engine").read_text() == "old"
    assert f"cannot rename {kept} to {out}" in str(error.value)
