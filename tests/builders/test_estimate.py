"""What a build says that it will take, against what it took."""

from __future__ import annotations

import pytest
from ranks import SIZES
from tiny import model_config, save_hf, tiny_model

from quasar_trt.builders import calibrate
from quasar_trt.builders.build import build
from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.builders.estimate import Estimate, estimate
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.manifest import Limits
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import read_header

LIMITS = Limits(max_batch_size=4, max_seq_len=100, max_draft_len=3)
RECIPES = {
    "default": Recipe(),
    "mixed": Recipe(exclude=("transformer.layers.0.*", "*.mlp.proj"), lm_head="rescored"),
    "none": Recipe("none"),
}


def data_bytes(path) -> int:
    """Bytes of a weight file without its header."""
    return path.stat().st_size - len(read_header(path)[3])


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])  # biases, norms over heads
def test_sizes_on_disk_are_those_of_the_files(architecture, name, tp_size, tmp_path, monkeypatch):
    scratch = []

    def compiled(config, recipe, tensors, path):
        compile_cpu(config, recipe, tensors, path)
        scratch.append(data_bytes(path))

    monkeypatch.setattr("quasar_trt.builders.self_text.default_engine", lambda: "cpu")
    monkeypatch.setattr("quasar_trt.builders.self_text.compile_cpu", compiled)
    model = str(save_hf(tiny_model(architecture, 1, **SIZES), tmp_path / "model"))
    options = {"progress": False, "tp_size": tp_size, "max_seq_len": 64}
    if RECIPES[name].quantized:
        options |= {"calib_size": 1, "calib_max_seq_length": 8}
    needs = build(model, tmp_path / "out", RECIPES[name], dry_run=True, **options)
    build(model, tmp_path / "out", RECIPES[name], **options)
    assert needs.checkpoint == sum(map(data_bytes, (tmp_path / "out" / "checkpoint").glob("*.safetensors")))
    assert needs.engine == sum(map(data_bytes, (tmp_path / "out").glob("*.engine")))
    assert sum(scratch) == needs.scratch


def test_what_costs_memory_counts(monkeypatch):
    config = model_config(tiny_model("LlamaForCausalLM", hidden_size=768, intermediate_size=2048, vocab_size=400))

    def memory(recipe: Recipe, tokens: int = 4096) -> int:
        return estimate(config, recipe, 1, tokens, LIMITS).memory

    assert memory(Recipe("none")) < memory(Recipe(rounding="nearest")) < memory(Recipe())
    assert memory(Recipe(), 4096) < memory(Recipe(), 8192)
    wide = 3 * 4 * 2048**2  # the second moment of the inputs of mlp.proj, its order and its factor
    assert memory(Recipe()) - memory(Recipe(rounding="nearest")) == wide
    assert estimate(config, Recipe(), 1, 1, LIMITS).scratch > 0
    monkeypatch.setattr(calibrate, "_WRITES_ITSELF", 0)
    assert estimate(config, Recipe(), 1, 1, LIMITS).scratch == 0


def test_plans_take_the_disk_of_their_weights_and_memory_to_compile_them():
    config = model_config(tiny_model("LlamaForCausalLM", hidden_size=768, intermediate_size=2048, vocab_size=400))
    recipe = Recipe(activations=16, lm_head="bf16")
    one, two = (estimate(config, recipe, 1, 1, LIMITS, plans) for plans in (1, 2))
    assert (one.engine, two.engine) == (one.checkpoint, 2 * one.checkpoint)
    assert one.memory == two.memory > 3 * one.checkpoint
    tokens = LIMITS.max_batch_size * PlanSizes(LIMITS, 1).capacity
    kept = tokens * 2 * 2 * config.num_hidden_layers * config.kv_size  # bytes of keys and values in BF16
    assert one.gpu_memory == two.gpu_memory == one.checkpoint + kept
    rescored = estimate(config, Recipe(activations=16), 1, 1, LIMITS, 1)
    assert rescored.engine - one.engine == 400 * (768 + 4)
    of_two_ranks = estimate(config, recipe, 2, 1, LIMITS, 1)
    assert of_two_ranks.gpu_memory == of_two_ranks.checkpoint // 2 + kept // 2
    whole, half = (estimate(config, Recipe("none"), ranks, 1, LIMITS, 1).memory for ranks in (1, 2))
    assert half < whole  # one rank's plan is compiled at a time


def test_an_estimate_is_one_line_in_gigabytes():
    needs = Estimate(checkpoint=1_500_000_000, engine=1_240_000_000, scratch=0, memory=2_060_000_000)
    text = "needs about 2.1 GB of memory and 2.74 GB of disk (checkpoint 1.50 GB, engine 1.24 GB)"
    assert str(needs) == text
    needs = Estimate(checkpoint=1_500_000_000, engine=1_240_000_000, scratch=2_200_000_000, memory=2_060_000_000)
    assert str(needs) == f"{text}, 2.20 GB more while it writes text"
    needs = Estimate(1_500_000_000, 1_240_000_000, 0, 2_060_000_000, gpu_memory=3_000_000_000)
    assert str(needs) == f"{text}, to run 3.00 GB of GPU memory for each rank"
