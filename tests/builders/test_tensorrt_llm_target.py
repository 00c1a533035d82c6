"""Engines for TensorRT-LLM, on a double of it, and the command that builds them elsewhere."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys

import pytest
import torch
from click.testing import CliRunner
from ranks import SIZES, forward, shards
from rich.console import Console
from tensorrt_llm_double import SpeculativeDecodingMode, TensorRTLLMDouble, run, run_ranks
from tiny import random_ids, rope_fields, save_hf, tiny_checkpoint, tiny_llama

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.builders import build as build_module
from quasar_trt.builders import tensorrt_llm_target as target_module
from quasar_trt.builders.build import build
from quasar_trt.builders.sharded_writer import ShardedWriter
from quasar_trt.builders.tensorrt_llm_target import choose_way
from quasar_trt.checkpoint import checkpoint_config, checkpoint_spec
from quasar_trt.cli import cli
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.errors import QuasarError
from quasar_trt.info import show_engine
from quasar_trt.manifest import Manifest
from quasar_trt.plan import Plan
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config

LIMITS = {"max_batch_size": 2, "max_seq_len": 64, "max_draft_len": 3}
QUICK = {"progress": False, "calib_size": 2, "calib_max_seq_length": 16, "target": "tensorrt-llm", **LIMITS}
STOCK = Recipe(smoothquant=0.5, lm_head="bf16")
SQUARE = {"head_dim": 8}  # six heads of 8 are hidden_size


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_hf(tiny_llama(num_hidden_layers=2, **SQUARE), tmp_path_factory.mktemp("model"))


@pytest.fixture
def host(monkeypatch):
    return TensorRTLLMDouble().install(monkeypatch)


def built(model_dir, tmp_path, capsys, recipe=STOCK, **options):
    """(manifest, directory, what was printed)"""
    directory = tmp_path / "out"
    manifest = build(str(model_dir), directory, recipe, **QUICK | options)
    Manifest.open(directory).verify(directory)
    return manifest, directory, capsys.readouterr().err


# On a host with TensorRT-LLM


def test_stock_modules_run_a_plainly_smoothed_checkpoint(model_dir, tmp_path, capsys, host):
    host.ids = list(range(1, 12))
    manifest, _, said = built(model_dir, tmp_path, capsys)
    assert "tensorrt-llm 1.2.1, way 'stock': TensorRT-LLM's own modules" in said and "is not needed" in said
    assert manifest.plan == Plan("tensorrt-llm", "1.2.1", (90,), "stock", 8192)
    assert set(manifest.files) == {"checkpoint/rank0.safetensors", "tensorrt_llm/rank0.engine"}
    (engine,) = host.engines
    assert type(engine.model).__name__ == "LlamaForCausalLM" and engine.model.warnings == []
    options = engine.options
    assert options.speculative_decoding_mode is SpeculativeDecodingMode.DRAFT_TOKENS_EXTERNAL
    assert (options.max_batch_size, options.max_input_len, options.max_seq_len) == (2, 64, 64 + 3)
    assert (options.max_draft_len, options.max_num_tokens, options.output_timing_cache) == (3, 8192, None)
    assert options.plugin_config.use_paged_context_fmha is True
    assert host.devices == [0]


def test_both_readers_find_their_config_json(model_dir, tmp_path, capsys, host):
    _, directory, _ = built(model_dir, tmp_path, capsys)
    ours = json.loads((directory / "config.json").read_text())
    theirs = json.loads((directory / "tensorrt_llm" / "config.json").read_text())
    assert ours["target"] == "tensorrt-llm" and "format_version" in ours
    assert theirs.keys() == {"version", "pretrained_config", "build_config"}
    assert theirs["build_config"]["speculative_decoding_mode"] == 2
    assert theirs["pretrained_config"]["quantization"]["kv_cache_quant_algo"] is None  # INT8 would turn drafts off
    console = Console(file=io.StringIO(), width=120)
    show_engine(directory, Manifest.open(directory), console)
    assert "SM 90, by tensorrt-llm 1.2.1, its own modules" in console.file.getvalue()


def test_our_model_class_takes_the_rest(model_dir, tmp_path, capsys, host):
    host.ids = list(range(1, 12))
    manifest, _, said = built(model_dir, tmp_path, capsys, recipe=Recipe(lm_head="int8"))
    assert (
        "way 'quasar': our model class, because TensorRT-LLM's own modules cannot have a rotated model, an INT8 head"
        in said
    )
    assert manifest.plan.lowering == "quasar"
    assert type(host.engines[0].model).__name__ == "QuasarForCausalLM"


def test_a_gpu_without_smoothquant_gets_our_model_class(model_dir, tmp_path, capsys, monkeypatch):
    host = TensorRTLLMDouble(sm=100).install(monkeypatch)
    manifest, _, said = built(model_dir, tmp_path, capsys)
    assert "cannot have INT8 on SM 100" in said
    assert manifest.plan == Plan("tensorrt-llm", "1.2.1", (100,), "quasar", 8192)
    assert type(host.engines[0].model).__name__ == "QuasarForCausalLM"
    assert choose_way(*tiny_checkpoint(**SQUARE)[:2], 100)[0] == "stock"  # BF16 is no SmoothQuant


def test_a_gpu_that_no_kernel_is_compiled_for_is_refused(model_dir, tmp_path, monkeypatch):
    TensorRTLLMDouble(sm=103).install(monkeypatch)
    with pytest.raises(
        QuasarError, match=r"this GPU is SM 103; plugins are compiled for 80, 86.* or quantization 'none'"
    ):
        build(str(model_dir), tmp_path / "out", STOCK, **QUICK)
    assert not any(tmp_path.iterdir())


def test_each_rank_is_built_by_a_worker_on_its_gpu(model_dir, tmp_path, capsys, monkeypatch):
    host = TensorRTLLMDouble(gpus=2).install(monkeypatch)
    pools = []

    class Pool:
        def __init__(self, workers, mp_context):
            pools.append((workers, mp_context.get_start_method()))

        def __enter__(self):
            return self

        def __exit__(self, *raised):
            pass

        def submit(self, function, job):
            function(job)
            return type("Future", (), {"result": lambda self: None})()

    monkeypatch.setattr(target_module, "ProcessPoolExecutor", Pool)
    manifest, directory, _ = built(model_dir, tmp_path, capsys, tp_size=2)
    assert pools == [(2, "spawn")]
    assert host.devices == [0, 1]
    assert [engine.model.config.mapping.rank for engine in host.engines] == [0, 1]
    assert {"tensorrt_llm/rank0.engine", "tensorrt_llm/rank1.engine"} <= set(manifest.files)
    assert (directory / "tensorrt_llm" / "rank1.engine").read_bytes() == b"engine of rank 1"


def test_what_tensorrt_llm_says_is_the_reason_and_nothing_is_left(model_dir, tmp_path, host):
    host.fails = RuntimeError("something\nEngine building failed, please check the error log.")
    with pytest.raises(QuasarError, match=r"^tensorrt-llm cannot build rank 0: Engine building failed, please"):
        build(str(model_dir), tmp_path / "out", STOCK, **QUICK)
    assert not any(tmp_path.iterdir())


def test_an_existing_engine_directory_can_be_replaced(model_dir, tmp_path, capsys, host):
    built(model_dir, tmp_path, capsys)
    built(model_dir, tmp_path, capsys, force=True)


# On any other machine


@pytest.mark.parametrize(
    ("release", "why"),
    [
        (None, "the package tensorrt-llm is needed: not installed (pip install 'quasar-trt[tensorrt-llm]')"),
        (
            "1.3.0rc1",
            "tensorrt-llm 1.3.0rc1 has no TensorRT engine backend that is known here: install tensorrt-llm 1.2.1",
        ),
        (
            "0.21.0",
            "install tensorrt-llm 1.2.1, the last release with it (1.0.0 for CUDA 12), or build with --target tensorrt",
        ),
    ],
)
def test_elsewhere_the_directory_ends_with_its_checkpoint(model_dir, tmp_path, capsys, monkeypatch, release, why):
    TensorRTLLMDouble().install(monkeypatch, release)
    manifest, directory, said = built(model_dir, tmp_path, capsys)
    assert manifest.plan is None and set(manifest.files) == {"checkpoint/rank0.safetensors"}
    assert not (directory / "tensorrt_llm").exists()
    note, way, command = said.splitlines()[-3:]
    assert f"note: {directory} ends with its checkpoint, no engine was built: " in note and why in note
    assert "way 'stock'" in way
    assert command.split() == [
        *["trtllm-build", "--checkpoint_dir", str(directory / "checkpoint")],
        *["--output_dir", str(directory / "tensorrt_llm"), "--max_batch_size", "2", "--max_input_len", "64"],
        *["--max_seq_len", "64", "--max_num_tokens", "8192", "--max_draft_len", "3"],
        *["--speculative_decoding_mode", "draft_tokens_external", "--use_paged_context_fmha", "enable"],
    ]


def test_the_command_names_our_model_class_and_finds_its_file(model_dir, tmp_path, capsys):
    _, _, said = built(model_dir, tmp_path, capsys, recipe=Recipe(lm_head="bf16"))
    way, command = said.splitlines()[-2:]
    assert "way 'quasar'" in way
    assert command.endswith("--model_cls_name QuasarForCausalLM")
    code = command.split("python -c '")[1].split("'")[0]
    printed = io.StringIO()
    exec(code, {"print": printed.write})
    assert printed.getvalue().endswith("tensorrt_llm_model.py")


def test_a_host_without_a_gpu_ends_with_the_checkpoint_too(model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("quasar_trt.tensorrt_llm_stack.version_of", lambda name: "1.2.1")
    manifest, _, said = built(model_dir, tmp_path, capsys)
    assert manifest.plan is None
    assert re.search("no engine was built: (torch .* is built without CUDA|no NVIDIA driver)", said)


@pytest.mark.parametrize("release", [None, "1.2.1"])
def test_the_estimate_counts_engines_where_they_are_built(model_dir, tmp_path, monkeypatch, release):
    TensorRTLLMDouble().install(monkeypatch, release)
    needs = build(str(model_dir), tmp_path / "out", STOCK, dry_run=True, **QUICK)
    assert needs.engine == (needs.checkpoint if release else 0)


def test_what_no_machine_builds_is_refused_before_the_model_is_read(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "open_source", lambda *args, **options: pytest.fail("the model was opened"))
    for recipe, options, message in (
        (Recipe(), {}, "lm_head is 'rescored'; target 'tensorrt-llm' allows bf16, int8"),
        (STOCK, {"sm": (90,)}, "sm is 90; target 'tensorrt-llm' compiles for the machine's own GPU"),
    ):
        with pytest.raises(QuasarError, match=message):
            build(str(model_dir), tmp_path / "out", recipe, **QUICK | options)


def test_yarn_is_refused_before_any_weight_is_read(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    model_dir = save_hf(tiny_llama(num_hidden_layers=1, **rope_fields(**yarn, rope_theta=1e4)), tmp_path / "model")
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(QuasarError, match=r"rope type is 'yarn'.*--target tensorrt"):
        build(str(model_dir), tmp_path / "out", STOCK, **QUICK)


def test_command_line_builds_without_more_options(model_dir, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(build_module, "build", lambda *arguments, **options: calls.append((arguments, options)))
    command = [
        "build",
        str(model_dir),
        "--output-dir",
        str(tmp_path / "out"),
        "--target",
        "tensorrt-llm",
        "--tp_size",
        "2",
    ]
    CliRunner().invoke(cli, command, catch_exceptions=False)
    ((_, _, recipe), options) = calls[0]
    assert (recipe.lm_head, recipe.activations, options["target"], options["tp_size"]) == ("bf16", 8, "tensorrt-llm", 2)


# What the engines compute


def checkpoint_dir(tmp_path, config, recipe, tensors, tp_size=1):
    """The checkpoint as our writer splits it."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(checkpoint_config(config, recipe, tp_size)))
    with ShardedWriter(directory, config, recipe, tp_size) as writer:
        for name in checkpoint_spec(config, recipe):
            writer.write(name, tensors[name])
    return directory


def loaded(directory, own, tp_size=1):
    """The models of all ranks, by the class that a build takes."""
    modules = importlib.import_module("tensorrt_llm.models.modeling_utils")
    if own:
        model_class = importlib.import_module("quasar_trt.builders.tensorrt_llm_model").QuasarForCausalLM
    models = []
    for rank in range(tp_size):
        config = modules.PretrainedConfig.from_json_file(str(directory / "config.json"))
        config.set_rank(rank)
        if not own:
            model_class = sys.modules["tensorrt_llm.models"].MODEL_MAP[config.architecture]
        models.append(model_class.from_checkpoint(str(directory), config=config))
        assert models[-1].warnings == []
    return models


def relative(error, expected):
    return float(error.norm() / expected.norm())


def assert_close(found, config, recipe, tensors, ids, tolerance):
    """In norm: what is rounded to BF16 moves logits, and activations by a code."""
    expected = ReferenceModel(config, recipe, tensors)(ids)
    assert relative(found[:, : config.vocab_size] - expected, expected) < tolerance


RECIPES = {
    "bf16": Recipe("none"),
    "textbook": STOCK,
    "rotated": Recipe(lm_head="int8"),
    "16-bit": Recipe(rotate=False, activations=16, lm_head="bf16"),
    "mixed": Recipe(exclude=("transformer.layers.0.*", "*.attention.dense"), lm_head="int8"),
}
IDS = random_ids(tiny_checkpoint()[0], 21)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_our_model_class_computes_every_recipe(tmp_path, host, architecture, recipe):
    overrides = {"attention_bias": True, "mlp_bias": True} if architecture == "LlamaForCausalLM" else {}
    model = tiny_checkpoint(architecture=architecture, recipe=RECIPES[recipe], num_hidden_layers=2, **overrides)
    (ours,) = loaded(checkpoint_dir(tmp_path, *model), own=True)
    assert_close(run(ours, IDS), *model, IDS, tolerance=0.05)


@pytest.mark.parametrize("recipe", RECIPES)
def test_our_model_class_computes_as_several_ranks(tmp_path, host, recipe):
    sizes = SIZES | {"num_hidden_layers": 2, "attention_bias": True}  # one rank and three have the same Hadamard blocks
    config, recipe, tensors = tiny_checkpoint(architecture="Qwen3ForCausalLM", recipe=RECIPES[recipe], **sizes)
    models = loaded(checkpoint_dir(tmp_path, config, recipe, tensors, tp_size=3), own=True, tp_size=3)
    first, *others = run_ranks(models, IDS)
    assert all(torch.equal(first, other) for other in others) and first.shape[1] == 132
    blocks = hadamard_blocks(config, recipe)
    expected = forward(rank_config(config, 3), recipe, shards(config, tensors, 3), blocks, IDS)
    assert relative(first[:, :131] - expected, expected) < 0.05


@pytest.mark.parametrize("recipe", ["bf16", "textbook"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_stock_modules_load_and_compute_what_is_called_stock(tmp_path, host, architecture, recipe, tp_size):
    model = tiny_checkpoint(architecture=architecture, recipe=RECIPES[recipe], num_hidden_layers=2, **SQUARE)
    models = loaded(checkpoint_dir(tmp_path, *model, tp_size), own=False, tp_size=tp_size)
    assert type(models[0]).__name__ == architecture
    found = run(models[0], IDS) if tp_size == 1 else run_ranks(models, IDS)[0]
    assert_close(found, *model, IDS, tolerance=0.05)


def test_a_stock_checkpoint_runs_in_our_model_class_too(tmp_path, host):
    model = tiny_checkpoint(recipe=STOCK, num_hidden_layers=2, **SQUARE)
    (ours,) = loaded(checkpoint_dir(tmp_path, *model), own=True)
    assert ours.config.architecture == "LlamaForCausalLM" and ours.config.quantization.quant_algo is None
    assert_close(run(ours, IDS), *model, IDS, tolerance=0.05)
