"""Plans for GPUs, compiled on a machine without one."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from plan_double import CpuDevice
from ranks import SIZES
from rich.console import Console
from tensorrt_builder_double import TensorRTBuilderDouble
from tiny import save_hf, tiny_checkpoint, tiny_llama, write_engine_dir

from quasar_trt.builders import build as build_module
from quasar_trt.builders import layer_quantizer, targets, tensorrt_target
from quasar_trt.builders.build import build
from quasar_trt.builders.evaluate import evaluate_fidelity
from quasar_trt.builders.tensorrt_target import compile_plans
from quasar_trt.checkpoint import Checkpoint
from quasar_trt.cli import cli
from quasar_trt.engines import cuda_device
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.errors import QuasarError
from quasar_trt.fidelity_report import read_fidelity
from quasar_trt.info import show_engine
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.plan import Plan
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import map_tensors

LIMITS = Limits(max_batch_size=2, max_seq_len=64, max_draft_len=3)
SLOT = (2, PlanSizes(LIMITS, 64).capacity, 16)  # of keys, of the tiny model
QUICK = {"progress": False, "calib_size": 2, "calib_max_seq_length": 16}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_hf(tiny_llama(num_hidden_layers=2), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine_dir(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines") / "rtx"
    limits = dataclasses.asdict(LIMITS)
    build(
        str(model_dir),
        directory,
        Recipe(activations=16, lm_head="bf16"),
        target="tensorrt-rtx",
        sm=(80, 89),
        **QUICK,
        **limits,
    )
    return directory


def refusal(model_dir, tmp_path, **options) -> str:
    recipe = options.pop("recipe", Recipe(activations=16, lm_head="bf16"))
    with pytest.raises(QuasarError) as error:
        build(str(model_dir), tmp_path / "out", recipe, **QUICK | {"target": "tensorrt-rtx", "sm": (80,)} | options)
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_directory_holds_a_plan_for_each_gpu(engine_dir):
    manifest = Manifest.open(engine_dir)
    manifest.verify(engine_dir)
    assert manifest.target == "tensorrt-rtx"
    assert manifest.plan == Plan("tensorrt-rtx", "1.7.1.116", (80, 89), "weight_only", 64)
    assert manifest.limits == LIMITS
    weights = {"basis.safetensors", "checkpoint/rank0.safetensors"}
    assert set(manifest.files) == weights | {"rank0.sm80.engine", "rank0.sm89.engine"}
    assert manifest.files["rank0.sm80.engine"] != manifest.files["rank0.sm89.engine"]
    assert Checkpoint.open(engine_dir / "checkpoint").recipe == Recipe(activations=16, lm_head="bf16")


def test_attention_over_what_a_mask_shows_is_one_fused_kernel_of_each_layer(engine_dir):
    """Without one TensorRT-RTX would multiply matrices, over keys and values that it copies for every query head."""
    for sm in (80, 89):
        plan = (engine_dir / f"rank0.sm{sm}.engine").read_bytes()
        assert plan.count(b"__global__ void _gemm_mha") == 2


def test_info_tells_what_the_plans_are_for(engine_dir):
    console = Console(file=io.StringIO(), width=120)
    show_engine(engine_dir, Manifest.open(engine_dir), console)
    assert "SM 80, 89, by tensorrt-rtx 1.7.1.116, BF16 activations" in console.file.getvalue()


def test_fidelity_is_that_of_the_checkpoint(engine_dir):
    fidelity = read_fidelity(engine_dir / "fidelity.json")
    if "kl" in fidelity:  # the model writes its own text where the native engine is there
        assert 0 <= fidelity["kl"] < 0.05
        assert "as the reference engine computes it" in fidelity["text"]


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing"])
def test_a_damaged_plan_is_refused(engine_dir, tmp_path, damage):
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in engine_dir.rglob("*"):
        target = copied / file.relative_to(engine_dir)
        target.mkdir(exist_ok=True) if file.is_dir() else target.write_bytes(file.read_bytes())
    plan = copied / "rank0.sm89.engine"
    content = bytearray(plan.read_bytes())
    content[100] ^= 1
    if damage == "missing":
        plan.unlink()
    else:
        plan.write_bytes(content if damage == "altered" else content[:-1])
    with pytest.raises(QuasarError, match=f"rank0.sm89.engine.*{damage}.*build the engine again|is missing"):
        Manifest.open(copied)


def test_a_plan_grows_by_the_bytes_of_its_int8_weights(tmp_path):
    sizes = {}
    for intermediate in (256, 16384):
        overrides = {"num_hidden_layers": 1, "intermediate_size": intermediate, "hidden_size": 240}
        config, recipe, tensors = tiny_checkpoint(recipe=Recipe(activations=16, lm_head="bf16"), **overrides)
        directory = write_engine_dir(tmp_path / str(intermediate), config, recipe, tensors)
        _, files = compile_plans("tensorrt-rtx", config, recipe, LIMITS, [80], directory, lambda count: None)
        sizes[intermediate] = files["rank0.sm80.engine"].size, sum(tensor.nbytes for tensor in tensors.values())
    (small, few), (large, many) = sizes.values()
    assert many - few > 11e6
    assert large - small == pytest.approx(many - few, rel=0.05)


def test_what_the_compiler_says_is_the_reason(tmp_path):
    config, recipe, tensors = tiny_checkpoint(num_hidden_layers=1)
    directory = write_engine_dir(tmp_path / "engine", config, recipe, tensors)
    limits = dataclasses.replace(LIMITS, max_batch_size=2**20, max_seq_len=2**20)
    with pytest.raises(QuasarError, match="tensorrt-rtx cannot compile this model for SM 80: IBuilder"):
        compile_plans("tensorrt-rtx", config, recipe, limits, [80], directory, lambda count: None)


def test_wrong_targets_are_refused_before_the_model_is_read(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "open_source", lambda *args, **options: pytest.fail("the model was opened"))
    assert "sm is 90, 70; tensorrt-rtx 1.7.1.116 compiles for 75, 80, " in refusal(model_dir, tmp_path, sm=(90, 80, 70))
    assert "sm is missing" in refusal(model_dir, tmp_path, sm=())
    assert "activations is 8; target 'tensorrt-rtx'" in refusal(model_dir, tmp_path, recipe=Recipe(lm_head="bf16"))
    static = Recipe(static_activations=True)
    assert "leave static_activations out" in refusal(model_dir, tmp_path, recipe=static, target="cpu", sm=())
    assert "did you mean 'tensorrt-rtx'" in refusal(model_dir, tmp_path, target="tensorrt_rtx")
    assert "target 'cpu' has no use for it" in refusal(model_dir, tmp_path, target="cpu")


def test_a_missing_stack_is_named_with_the_line_that_installs_it(model_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    monkeypatch.setattr("quasar_trt.tensorrt_stack.version_of", lambda name: None)
    assert "pip install 'quasar-trt[tensorrt-rtx]'" in refusal(model_dir, tmp_path)


def test_a_disk_that_gets_full_is_the_reason_and_leaves_nothing(model_dir, tmp_path, monkeypatch):
    plan_writer = tensorrt_target._plan_writer
    monkeypatch.setattr(tensorrt_target, "_plan_writer", lambda trt, path: plan_writer(trt, Path("/dev/full")))
    assert f"cannot write {tmp_path}/out: No space left on device; make room" in refusal(model_dir, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_larger_than_the_memory_is_refused_with_both_numbers(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "available_memory", lambda: 10**8)
    assert "takes about 0.6 GB of memory, 0.1 GB are available" in refusal(model_dir, tmp_path)
    asked = build(
        str(model_dir),
        tmp_path / "out",
        Recipe(activations=16),
        target="tensorrt-rtx",
        sm=(80,),
        dry_run=True,
        **QUICK,
    )
    assert asked.memory > 10**8  # which is said without a refusal


def test_static_scales_are_compiled_as_explicit_quantization_and_measured(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_quantizer, "LARGEST_STATIC_ERROR", 0.01)
    out, limits = tmp_path / "out", dataclasses.asdict(LIMITS)
    recipe = Recipe(static_activations=True, lm_head="rescored")
    build(str(model_dir), out, recipe, target="tensorrt-rtx", sm=(80,), **QUICK, **limits)
    manifest, fidelity = Manifest.open(out), read_fidelity(out / "fidelity.json")
    assert manifest.plan.lowering == "qdq"
    errors = {name: group["static_error"] for name, group in fidelity["groups"].items()}
    weight_only = {name for name in manifest.recipe.weight_only if name in errors}  # groups by their first linear
    assert weight_only == {name for name, error in errors.items() if error > 0.01}
    assert 0 < len(weight_only) < len(errors)
    assert Checkpoint.open(out / "checkpoint").recipe == manifest.recipe
    assert manifest.recipe.to_dict()["activation_granularity"] == "per_tensor"
    measured = evaluate_fidelity(out, tokens=32, progress=False)
    assert 0 < measured["kl"] < 0.05 and "as the reference engine computes it" in measured["text"]
    console = Console(file=io.StringIO(), width=300)
    show_engine(out, manifest, console)
    shown = console.file.getvalue()
    assert "explicit Q/DQ of activations" in shown
    assert "8-bit activations of static scales" in shown
    assert f"weight-only in {len(manifest.recipe.weight_only)} linears" in shown


def test_ranks_are_compiled_with_their_collectives(tmp_path):
    model_dir = save_hf(tiny_llama(num_hidden_layers=1, **SIZES), tmp_path / "model")
    options = QUICK | dataclasses.asdict(LIMITS) | {"tp_size": 2}
    recipe = Recipe(activations=16, lm_head="bf16")
    manifest = build(str(model_dir), tmp_path / "out", recipe, target="tensorrt-rtx", sm=(80,), **options)
    Manifest.open(tmp_path / "out").verify(tmp_path / "out")
    for rank in (0, 1):
        plan = (tmp_path / "out" / f"rank{rank}.sm80.engine").read_bytes()
        assert b"ALL_REDUCE" in plan and b"ALL_GATHER" in plan
    assert manifest.files["rank0.sm80.engine"] != manifest.files["rank1.sm80.engine"]


def test_what_a_recipe_leaves_open_follows_from_the_target(model_dir, tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(build_module, "build", lambda *arguments, **options: built.append((arguments, options)))
    for extra in (
        [],
        ["--target", "tensorrt-rtx", "--sm", "80,89"],
        ["--target", "tensorrt-rtx", "--activations", "8"],
        ["--target", "tensorrt-rtx", "--static-activations", "--lm-head", "int8"],
        ["--target", "tensorrt"],
        ["--target", "tensorrt", "--quantization", "none"],
    ):
        command = ["build", str(model_dir), "--output-dir", str(tmp_path / "out"), *extra]
        CliRunner().invoke(cli, command, catch_exceptions=False)
    recipes = [arguments[2] for arguments, _ in built]
    assert [recipe.activations for recipe in recipes] == [8, 16, 8, 8, 8, None]
    assert [recipe.lm_head for recipe in recipes] == ["rescored", "bf16", "bf16", "int8", "bf16", None]
    assert [recipe.static_activations for recipe in recipes] == [False, False, False, True, False, False]
    assert [(options["target"], options["sm"]) for _, options in built[:2]] == [("cpu", ()), ("tensorrt-rtx", (80, 89))]


# Target `tensorrt`, on a double of its builder


@pytest.fixture
def tensorrt(monkeypatch):
    double = TensorRTBuilderDouble()
    double.install(monkeypatch)
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda: CpuDevice(sm=90))
    return double


def test_target_tensorrt_compiles_plugins_for_its_own_gpu(model_dir, tmp_path, tensorrt, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    limits = dataclasses.asdict(LIMITS)
    manifest = build(str(model_dir), tmp_path / "out", Recipe(lm_head="bf16"), target="tensorrt", **QUICK, **limits)
    assert manifest.plan == Plan("tensorrt", "10.15.1", (90,), "plugin", 64)
    assert (tmp_path / "out" / "rank0.sm90.engine").read_bytes() == b"a plan"
    Manifest.open(tmp_path / "out").verify(tmp_path / "out")
    (network,) = tensorrt.networks
    plugins = [layer for layer in network.layers if layer.type.name == "PLUGIN_V3"]
    assert len(plugins) == 2 * 9  # in each layer: two norms, two smoothers, five linears
    assert {layer.attributes["sm"] for layer in plugins} == {90}
    one, every, prompt = tensorrt.profiles
    assert one["input_ids"] == ((1, 1), (1, 4), (1, 4))
    assert every["input_ids"] == ((1, 1), (2, 4), (2, 4))
    assert every["logits_rows"] == ((1,), (8,), (8,))
    assert every["past_keys.1"] == ((1, *SLOT), (2, *SLOT), (2, *SLOT))
    assert prompt["input_ids"] == ((1, 1), (1, 64), (1, 64))
    assert prompt["logits_rows"] == ((1,), (64,), (64,))
    assert every["visible"] == ((1, 1, 1, 3), (2, 1, 4, 6), (2, 1, 4, 6))
    assert [tensor.name for tensor in network._outputs][-2:] == ["hidden_states.2", "logits"]
    assert {profile["span"] for profile in tensorrt.profiles} == {((1,), SLOT[1:2], SLOT[1:2])}


def test_timings_are_kept_from_one_build_to_the_next(tmp_path, tensorrt, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, recipe, tensors = tiny_checkpoint(num_hidden_layers=1)
    directory = write_engine_dir(tmp_path / "engine", config, recipe, tensors)
    for times in (1, 2):
        compile_plans("tensorrt", config, recipe, LIMITS, [90], directory, lambda count: None)
        cache = tmp_path / "cache" / "quasar-trt" / "timing" / "tensorrt-10.15.1-sm90.cache"
        assert cache.read_bytes() == b"timed" * times
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "rank0.sm90.engine"))  # no directory can be there
    compile_plans("tensorrt", config, recipe, LIMITS, [90], directory, lambda count: None)


def test_static_scales_need_neither_plugins_nor_their_compiler(model_dir, tmp_path, tensorrt, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", None)
    recipe = Recipe(static_activations=True, lm_head="bf16")
    manifest = build(str(model_dir), tmp_path / "out", recipe, target="tensorrt", **QUICK, **dataclasses.asdict(LIMITS))
    assert manifest.plan.lowering == "qdq"
    kinds = Counter(layer.type.name for layer in tensorrt.networks[0].layers)
    assert kinds["QUANTIZE"] == 8 - len({name.replace("gate", "fc") for name in manifest.recipe.weight_only})
    assert "PLUGIN_V3" not in kinds


def test_each_rank_has_a_plan_of_its_own_part(tmp_path, tensorrt, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model_dir = save_hf(tiny_llama(num_hidden_layers=2, **SIZES), tmp_path / "model")
    options = QUICK | dataclasses.asdict(LIMITS) | {"tp_size": 2}
    manifest = build(str(model_dir), tmp_path / "out", Recipe(lm_head="bf16"), target="tensorrt", **options)
    assert {f"rank{rank}.sm90.engine" for rank in (0, 1)} <= set(manifest.files)
    Manifest.open(tmp_path / "out").verify(tmp_path / "out")
    first, second = tensorrt.networks
    for network in (first, second):
        kinds = [layer.metadata for layer in network.layers if layer.type.name == "DIST_COLLECTIVE"]
        assert kinds == ["ALL_REDUCE"] * 4 + ["ALL_GATHER"]
    assert tensorrt.profiles[0]["past_keys.0"][0] == (1, 3, SLOT[1], 8)  # half of the KV heads
    assert [tensor.shape for tensor in first._outputs][-1] == (-1, 131)
    files = [tmp_path / "out" / "checkpoint" / f"rank{rank}.safetensors" for rank in (0, 1)]
    for network, tensors in zip((first, second), map(map_tensors, files), strict=True):
        expected = tensors["transformer.layers.1.mlp.proj.weight"]
        constants = [layer.weights for layer in network.layers if layer.type.name == "CONSTANT"]
        same_size = [array for array in constants if array.size == expected.size and isinstance(array, np.ndarray)]
        assert any(np.array_equal(array, expected.ravel()) for array in same_size)


def test_a_gpu_that_no_kernel_is_compiled_for_is_refused_before_the_model_is_read(
    model_dir, tmp_path, tensorrt, monkeypatch
):
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda: CpuDevice(sm=103))
    monkeypatch.setattr(build_module, "open_source", lambda *args, **options: pytest.fail("the model was opened"))
    said = refusal(model_dir, tmp_path, target="tensorrt", sm=(), recipe=Recipe(lm_head="bf16"))
    assert said.startswith(
        "this GPU is SM 103; plugins are compiled for 80, 86, 89, 90, 100, 120: use one of these, or static"
    )
    for recipe in (Recipe("none"), Recipe(static_activations=True, lm_head="bf16")):  # which need none
        assert targets.check_target("tensorrt", recipe, 1, ()) == (103,)


def test_target_tensorrt_is_refused_where_it_cannot_compile(model_dir, tmp_path, tensorrt, monkeypatch):
    options = {"target": "tensorrt", "recipe": Recipe(lm_head="bf16")}
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda: CpuDevice(sm=90, free=1000))
    assert "on a double, 0.00 GB are free; build it with a smaller" in refusal(model_dir, tmp_path, **options, sm=())
    monkeypatch.delattr(tensorrt, "CollectiveOperation")
    assert "tensorrt 10.15.1 allows 1, several ranks need 11 or later" in refusal(
        model_dir, tmp_path, **options, tp_size=2
    )
    assert "sm is 80; target 'tensorrt' compiles for the machine's own GPU, a double, SM 90" in refusal(
        model_dir, tmp_path, **options
    )
    monkeypatch.setattr("quasar_trt.tensorrt_stack.version_of", lambda name: None)
    for stack in ("triton", "tensorrt"):
        monkeypatch.setitem(sys.modules, stack, None)
        assert f"the package {stack} is needed: not installed (pip install" in refusal(model_dir, tmp_path, **options)
