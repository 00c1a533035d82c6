"""From a model to an engine directory: what it holds, and that it appears whole or not at all."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from rich.console import Console
from tiny import checkpoint_tensors, random_ids, save_hf, tiny_llama
from tiny_gguf import write_gguf
from tiny_tokenizer import save_tokenizer

from quasar_trt.builders import build as build_module
from quasar_trt.builders import calibrate, self_text
from quasar_trt.builders.build import build
from quasar_trt.builders.estimate import Estimate
from quasar_trt.builders.hf_source import HfSource
from quasar_trt.builders.search import ALPHAS
from quasar_trt.checkpoint import Checkpoint, checkpoint_spec
from quasar_trt.engines import open_engine
from quasar_trt.engines.cpu_layout import packed_spec
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel, load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.fidelity_report import read_fidelity
from quasar_trt.info import show_engine
from quasar_trt.manifest import Manifest
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config
from quasar_trt.tensorfile import read_header

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
    # transformers 4 gives the model a special_tokens_map.json, which is copied
    assert [name for name in names if name != "special_tokens_map.json"] == [
        "basis.safetensors",
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
        ({"max_draft_len": 512}, ["max_draft_len is 512; max_seq_len 512 allows 1 to 511"]),
        ({"max_draft_len": 8, "max_seq_len": 8}, ["max_draft_len is 8; max_seq_len 8 allows 1 to 7"]),
        ({"calib_max_seq_length": 513}, ["calib_max_seq_length is 513; this model allows 1 to 512"]),
        ({"max_seq_len": 1000}, ["max_seq_len is 1000", "2 to 512"]),
        ({"calib_dataset": "missing.txt"}, ["cannot read calibration file missing.txt"]),
    ],
)
def test_bad_options_are_refused_and_leave_nothing(model_dir, tmp_path, options, words):
    message = refusal(str(model_dir), tmp_path / "out", Recipe(), **options)
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


def test_build_that_needs_more_memory_than_there_is_is_refused_with_both_numbers(model_dir, tmp_path):
    message = refusal(str(model_dir), tmp_path / "out", Recipe(), calib_size=10**12)
    assert re.match(
        r"building this model takes about \d+\.\d GB of memory, this machine has \d+\.\d GB; .*fewer or", message
    )
    assert list(tmp_path.iterdir()) == []


def test_default_lengths_fit_a_short_model(tmp_path):
    model = save_hf(tiny_llama(0, max_position_embeddings=12), tmp_path / "model")
    manifest = build(str(model), tmp_path / "int8", Recipe(), **QUIET, calib_size=2)
    assert (manifest.limits.max_seq_len, manifest.limits.max_draft_len) == (12, 11)
    assert manifest.calibration["tokens"] == 2 * 12


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
        (Recipe(rotate=False), "output of transformer.layers.0.mlp.proj"),
        (Recipe(smoothquant=0.5), "output of transformer.layers.0.mlp.proj"),
        (Recipe(), "transformer.layers.0.mlp.proj"),
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


@pytest.mark.parametrize(
    "stage",
    [
        "build.calibration_texts",
        "calibrate.write",
        "write_checkpoint.LayerQuantizer.__call__",
        "layer_quantizer.quantize_gptq",
        "sharded_writer.ShardedWriter.write",
        "build.compile_cpu",
        "fidelity.measure",
        "fidelity.open_engine",
        "build.write_json",
    ],
)
def test_nothing_is_left_after_an_interrupt(model_dir, tmp_path, monkeypatch, stage):
    def fail(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"quasar_trt.builders.{stage}", fail)
    with pytest.raises(KeyboardInterrupt):
        build(str(model_dir), tmp_path / "out", Recipe(), **QUICK)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "open_source", lambda *a, **k: pytest.fail("the source was opened"))
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


def without_weights(monkeypatch) -> None:
    monkeypatch.setattr(HfSource, "tensor", lambda self, name: pytest.fail(f"{name} was read"))


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (
            "transformer.layers.7.*",
            "'transformer.layers.7.*' matches no linear; allowed: patterns of names from transformer",
        ),
        ("lm_head", "'lm_head' matches no linear"),
        ("*.mlp.gate", "exclude covers one of transformer.layers.0.mlp.fc and transformer.layers.0.mlp.gate"),
    ],
)
def test_exclusions_that_cannot_act_are_refused_before_a_weight_is_read(
    model_dir, tmp_path, monkeypatch, exclude, message
):
    without_weights(monkeypatch)
    assert message in refusal(str(model_dir), tmp_path / "out", Recipe(exclude=(exclude,)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [
        (3, "tp_size 3 does not divide num_key_value_heads 2, intermediate_size 80; allowed for this model: 1, 2"),
        (0, "tp_size is 0; it must be a whole number of at least 1"),
    ],
)
def test_a_tp_size_that_does_not_divide_is_refused_before_a_weight_is_read(
    model_dir, tmp_path, monkeypatch, tp_size, message
):
    without_weights(monkeypatch)
    assert refusal(str(model_dir), tmp_path / "out", Recipe(), tp_size=tp_size) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["default", "textbook", "none"])
def test_two_ranks_have_a_whole_and_valid_directory(model_dir, tmp_path, name):
    recipe = {"default": Recipe(), "textbook": Recipe(smoothquant=0.5), "none": Recipe("none")}[name]
    built = build(str(model_dir), tmp_path / "out", recipe, tp_size=2, **(QUICK if recipe.quantized else QUIET))
    manifest = Manifest.open(tmp_path / "out")
    assert manifest == built and manifest.tp_size == 2
    manifest.verify(tmp_path / "out")
    assert sorted(manifest.files) == [
        "checkpoint/rank0.safetensors",
        "checkpoint/rank1.safetensors",
        "rank0.engine",
        "rank1.engine",
    ]
    checkpoint = Checkpoint.open(tmp_path / "out" / "checkpoint")
    assert (checkpoint.tp_size, checkpoint.config.num_attention_heads) == (2, 6)
    for rank in range(2):
        specs, _, metadata, _ = read_header(tmp_path / "out" / f"rank{rank}.engine")
        assert specs == packed_spec(rank_config(checkpoint.config, 2), recipe)
        assert metadata["rank"] == str(rank)
    # one process runs one rank: no distribution to measure
    measured = read_fidelity(tmp_path / "out" / "fidelity.json")
    assert measured.keys() == ({"groups"} if recipe.quantized else set())
    assert len(measured.get("groups", {})) == (12 if recipe.quantized else 0)
    out = io.StringIO()
    show_engine(tmp_path / "out", manifest, Console(file=out, width=100))
    assert "cpu, 2 ranks" in out.getvalue() and "not measured" in out.getvalue()


def test_what_was_chosen_is_recorded(engine_dir, model_dir, tmp_path):
    measured = read_fidelity(engine_dir / "fidelity.json")
    assert len(measured["groups"]) == 4 * 3
    for name, group in measured["groups"].items():
        assert (group["alpha"] in ALPHAS) == name.endswith(("dense", "proj")), name  # the others read a rotated stream
        assert 0 < group["error"] < 0.1
    build(str(model_dir), tmp_path / "textbook", Recipe(smoothquant=0.6), **QUICK)
    groups = read_fidelity(tmp_path / "textbook" / "fidelity.json")["groups"]
    assert {(group["alpha"], group["statistic"]) for group in groups.values()} == {(0.6, "max")}
    described = json.loads((tmp_path / "textbook" / "checkpoint" / "config.json").read_text())
    assert described["quantization"]["smoothquant_val"] == 0.6


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_large_model_reads_text_that_it_has_not_written(model_dir, tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(calibrate, "_WRITES_ITSELF", 0)
    monkeypatch.setattr(calibrate, "write", lambda *a, **k: pytest.fail("the model writes"))
    model = model_dir if tokenizer else save_hf(tiny_llama(3), tmp_path / "model")
    manifest = build(str(model), tmp_path / "out", Recipe(), **QUICK)
    assert manifest.calibration["source"] == ("text of the package" if tokenizer else "random ids")
    assert (manifest.calibration["samples"], manifest.calibration["tokens"]) == (4, 4 * 32)
    assert read_fidelity(tmp_path / "out" / "fidelity.json").keys() == {"groups"}
    out = io.StringIO()
    show_engine(tmp_path / "out", manifest, Console(file=out, width=100))
    assert "not measured" in out.getvalue() and "largest relative errors" in out.getvalue()
    assert build(str(model), tmp_path / "again", Recipe(), **QUICK).files == manifest.files
    build(str(model), tmp_path / "bf16", Recipe("none"), **QUIET)
    assert read_fidelity(tmp_path / "bf16" / "fidelity.json") == {}


def test_a_dry_run_says_what_the_build_would_take_and_writes_nothing(model_dir, tmp_path, monkeypatch, capsys):
    without_weights(monkeypatch)
    needs = build(str(model_dir), tmp_path / "out", Recipe(), dry_run=True, **QUICK)
    assert isinstance(needs, Estimate)
    assert capsys.readouterr().err == f"{needs}\n"
    assert list(tmp_path.iterdir()) == []
    assert "calib_size is 0" in refusal(str(model_dir), tmp_path / "out", Recipe(), dry_run=True, calib_size=0)


@pytest.mark.parametrize("trusted", [False, True])
def test_code_that_a_checkpoint_brings_is_run_only_when_asked_for(model_dir, tmp_path, monkeypatch, trusted):
    seen = []
    original = build_module.open_source

    def open_source(model, *, check, trust_remote_code):
        seen.append(trust_remote_code)
        return original(model, check=check)

    monkeypatch.setattr(build_module, "open_source", open_source)
    build(str(model_dir), tmp_path / "o", Recipe("none"), dry_run=True, trust_remote_code=trusted, **QUIET)
    assert seen == [trusted]
