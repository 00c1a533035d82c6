"""Plans for GPUs, compiled on a machine without one."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest
from click.testing import CliRunner
from plan_double import CpuDevice
from rich.console import Console
from tensorrt_builder_double import TensorRTBuilderDouble
from tiny import save_hf, tiny_checkpoint, tiny_llama, write_engine_dir

from quasar_trt.builders import build as build_module
from quasar_trt.builders.build import build
from quasar_trt.builders.tensorrt_target import compile_plans
from quasar_trt.checkpoint import Checkpoint
from quasar_trt.cli import cli
from quasar_trt.engines import cuda_device
from quasar_trt.errors import QuasarError
from quasar_trt.fidelity_report import read_fidelity
from quasar_trt.info import show_engine
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.plan import Plan
from quasar_trt.recipe import Recipe

LIMITS = Limits(max_batch_size=2, max_seq_len=64, max_draft_len=3)
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
    assert set(manifest.files) == {"checkpoint/rank0.safetensors", "rank0.sm80.engine", "rank0.sm89.engine"}
    assert manifest.files["rank0.sm80.engine"] != manifest.files["rank0.sm89.engine"]
    assert Checkpoint.open(engine_dir / "checkpoint").recipe == Recipe(activations=16, lm_head="bf16")


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
    assert "lm_head is 'rescored'; target 'tensorrt-rtx'" in refusal(model_dir, tmp_path, recipe=Recipe())
    assert "activations is 8; target 'tensorrt-rtx'" in refusal(model_dir, tmp_path, recipe=Recipe(lm_head="bf16"))
    assert "tp_size is 2; target 'tensorrt-rtx' allows 1" in refusal(model_dir, tmp_path, tp_size=2)
    rescored = Recipe(activations=16, lm_head="rescored")
    assert "lm_head is 'rescored'; target 'tensorrt-rtx' allows" in refusal(model_dir, tmp_path, recipe=rescored)
    assert "did you mean 'tensorrt-rtx'" in refusal(model_dir, tmp_path, target="tensorrt_rtx")
    assert "target 'cpu' has no use for it" in refusal(model_dir, tmp_path, target="cpu")


def test_a_missing_stack_is_named_with_the_line_that_installs_it(model_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    monkeypatch.setattr("quasar_trt.tensorrt_stack.version_of", lambda name: None)
    assert "pip install 'quasar-trt[tensorrt-rtx]'" in refusal(model_dir, tmp_path)


def test_command_line_keeps_bf16_activations_where_plugins_cannot_be(model_dir, tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(build_module, "build", lambda *arguments, **options: built.append((arguments, options)))
    for extra in (
        [],
        ["--target", "tensorrt-rtx", "--sm", "80,89"],
        ["--target", "tensorrt-rtx", "--activations", "8"],
    ):
        command = ["build", str(model_dir), "--output-dir", str(tmp_path / "out"), *extra]
        CliRunner().invoke(cli, command, catch_exceptions=False)
    assert [arguments[2].activations for arguments, _ in built] == [8, 16, 8]
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
    (profile,) = tensorrt.profiles
    assert profile["input_ids"] == ((1, 1), (2, 4), (2, 64))
    assert profile["logits_rows"] == ((1,), (8,), (64,))
    assert profile["past_keys.1"] == ((1, 2, 68, 16), (2, 2, 68, 16), (2, 2, 68, 16))
    assert profile["span"] == ((1,), (68,), (68,))


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


def test_target_tensorrt_is_refused_where_it_cannot_compile(model_dir, tmp_path, tensorrt, monkeypatch):
    options = {"target": "tensorrt", "recipe": Recipe(lm_head="bf16")}
    assert "tp_size is 2; target 'tensorrt' allows 1" in refusal(model_dir, tmp_path, **options, tp_size=2)
    assert "sm is 80; target 'tensorrt' compiles for the machine's own GPU, a double, SM 90" in refusal(
        model_dir, tmp_path, **options
    )
    monkeypatch.setattr("quasar_trt.tensorrt_stack.version_of", lambda name: None)
    for stack in ("triton", "tensorrt"):
        monkeypatch.setitem(sys.modules, stack, None)
        assert f"the package {stack} is needed: not installed (pip install" in refusal(model_dir, tmp_path, **options)
