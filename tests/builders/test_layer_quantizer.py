"""Quantized checkpoints: for every architecture and recipe what is stored is near the source, and is what the recipe says."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from ranks import SIZES, forward
from tiny import MODELS, checkpoint_tensors, random_ids, save_hf, tiny_llama, tiny_model

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.builders.convert import Converter
from quasar_trt.builders.layer_quantizer import LayerQuantizer
from quasar_trt.builders.quantize import quantize_rows
from quasar_trt.builders.rotate import rotate_layer, rotate_vocabulary, rotation
from quasar_trt.builders.search import ALPHAS, Trial
from quasar_trt.builders.source import open_source
from quasar_trt.builders.write_checkpoint import write_checkpoint
from quasar_trt.checkpoint import Checkpoint, checkpoint_spec
from quasar_trt.engines.reference import ReferenceModel, load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.plugins.reference import hadamard
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config
from quasar_trt.tensorfile import read_header, to_numpy

LAYER_0 = "transformer.layers.0.*"
RECIPES = {
    "default": Recipe(),
    "searched": Recipe(rotate=False),
    "textbook": Recipe(smoothquant=0.5),
    "textbook-rotated": Recipe(smoothquant=0.5, rotate=True, rounding="gptq"),
    "nearest": Recipe(rounding="nearest"),
    "16-bit": Recipe(activations=16),
    "without-layer-0": Recipe(exclude=(LAYER_0,)),
    "without-proj": Recipe(rotate=False, exclude=("*.mlp.proj",)),
    "head": Recipe(lm_head="int8"),
    "none": Recipe("none"),
}
# Nats, of logits whose standard deviation is above 1; a random model is the hardest case for 8 bits.
LARGEST_KL = {"16-bit": 3e-3, "without-layer-0": 2e-3, "none": 1e-9}
TEXTS = (300, 200)


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """architecture -> (transformers model, its converter), of sizes that 2 and 3 ranks can share."""

    @cache
    def opened(architecture: str):
        overrides = {"attention_bias": True, "mlp_bias": True} if architecture == "LlamaForCausalLM" else {}
        model = tiny_model(architecture, 2, **SIZES, **overrides)
        return model, Converter(open_source(str(save_hf(model, tmp_path_factory.mktemp(architecture)))))

    return opened


def texts_for(config) -> list[list[int]]:
    return [random_ids(config, length, seed=length) for length in TEXTS]


def written(source: Converter, recipe: Recipe, directory, tp_size: int = 1):
    """(tensors of each rank, the quantizer) of a checkpoint that was written and opened again."""
    steps = []
    records, quantizer = write_checkpoint(source, recipe, texts_for(source.config), directory, steps.append, tp_size)
    assert steps == [1] * source.config.num_hidden_layers
    checkpoint = Checkpoint.open(directory)
    assert (checkpoint.config, checkpoint.recipe, checkpoint.tp_size) == (source.config, recipe, tp_size)
    basis = ["basis.safetensors"] if recipe.rotate and tp_size == 1 else []
    files = [*[f"checkpoint/{path.name}" for path in checkpoint.paths], *basis]
    assert {name: record.size for name, record in records.items()} == {
        name: (directory.parent / name).stat().st_size for name in files
    }
    spec = checkpoint_spec(rank_config(source.config, tp_size), recipe)
    assert all(read_header(path)[0] == spec for path in checkpoint.paths)
    return [load_tensors(path) for path in checkpoint.paths], quantizer


def divergence(model, logits: torch.Tensor, ids: list[int]) -> float:
    """The mean KL of the source model's next-token distributions and those of `logits`, in nats."""
    with torch.no_grad():
        p = model(torch.tensor([ids])).logits[0].double().log_softmax(dim=1)
    return float((p.exp() * (p - logits.double().log_softmax(dim=1))).sum(dim=1).mean())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_checkpoint_is_whole_and_near_its_source(architecture, name, source_of, tmp_path):
    model, source = source_of(architecture)
    recipe = RECIPES[name]
    (tensors,), _ = written(source, recipe, tmp_path / "checkpoint")
    ids = random_ids(source.config, 60, seed=9)
    logits = ReferenceModel(source.config, recipe, tensors)(ids)
    assert divergence(model, logits, ids) < LARGEST_KL.get(name, 8e-3)
    for stored in tensors.values():
        assert stored.dtype == torch.int8 or stored.isfinite().all()
        assert stored.dtype != torch.int8 or int(stored.min()) >= -127


@pytest.mark.parametrize("tp_size", [2, 3])
@pytest.mark.parametrize("name", ["default", "textbook", "without-proj", "head", "none"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_ranks_together_are_near_the_source(architecture, name, tp_size, source_of, tmp_path):
    model, source = source_of(architecture)
    recipe = RECIPES[name]
    ranks, _ = written(source, recipe, tmp_path / "checkpoint", tp_size)
    config = rank_config(source.config, tp_size)
    ids = random_ids(source.config, 60, seed=9)
    logits = forward(config, recipe, ranks, hadamard_blocks(config, recipe), ids)
    assert divergence(model, logits, ids) < LARGEST_KL.get(name, 8e-3)


@pytest.mark.parametrize("name", ["none", "searched", "without-proj"])
@pytest.mark.parametrize("architecture", MODELS)
def test_what_is_not_quantized_is_the_sources_bit_for_bit(architecture, name, source_of, tmp_path):
    recipe = RECIPES[name]
    _, source = source_of(architecture)
    (tensors,), _ = written(source, recipe, tmp_path / "checkpoint")
    smoothed = ("input_layernorm", "post_layernorm") if recipe.quantized else ()
    kept = [
        name
        for name, tensor in tensors.items()
        if tensor.dtype == torch.bfloat16 and not name.endswith(tuple(f"{norm}.weight" for norm in smoothed))
    ]
    assert ("transformer.layers.1.mlp.proj.weight" in kept) == (name != "searched")
    assert any("k_layernorm" in name for name in kept) == (architecture == "Qwen3ForCausalLM")
    assert any(name.endswith("qkv.bias") for name in kept) == source.config.qkv_bias
    assert [name for name in kept if not torch.equal(tensors[name], source[name])] == []


def test_a_rotated_checkpoint_holds_what_rotation_gives_and_norms_of_ones(source_of, tmp_path):
    _, source = source_of("LlamaForCausalLM")
    (tensors,), quantizer = written(source, RECIPES["without-layer-0"], tmp_path / "checkpoint")
    q = rotation(source.config.hidden_size)
    expected = rotate_layer(source.config, 0, source.layer(0), q)
    expected["lm_head.weight"] = rotate_vocabulary(source["lm_head.weight"], q, source["transformer.ln_f.weight"])
    expected["transformer.vocab_embedding.weight"] = rotate_vocabulary(source["transformer.vocab_embedding.weight"], q)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor.bfloat16()), name
    norms = [name for name in tensors if name.endswith(("layernorm.weight", "ln_f.weight"))]
    assert len(norms) == 2 * 3 + 1 and all((tensors[name] == 1).all() for name in norms)
    for name, choice in quantizer.choices.items():
        explicit = name.endswith(("dense", "proj"))
        assert (choice.alpha in ALPHAS) == explicit and (choice.statistic is not None) == explicit, name
        assert explicit or (choice.smoother == 1).all()
    assert not any(name.startswith("transformer.layers.0.") for name in quantizer.choices)


def observed(config, recipe, tensors, texts) -> dict[str, torch.Tensor]:
    """The input of every linear, as an engine on these checkpoint tensors computes it."""
    inputs: dict[str, torch.Tensor] = {}
    model = ReferenceModel(config, recipe, tensors, observe=inputs.__setitem__)
    model.hidden_states([(ids, model.new_cache()) for ids in texts])
    return inputs


@pytest.mark.parametrize(("alpha", "bits", "tolerance"), [(0.5, 8, 0.03), (0.5, 16, 5e-4), (0.7, 16, 5e-4)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_an_exponent_with_rounding_to_nearest_is_the_textbook(
    architecture, alpha, bits, tolerance, source_of, tmp_path
):
    """Written out here, for the inputs of the quantized model itself: one exponent, folded, rounded.

    An activation at a tie may round either way there, which changes what lies behind it: less so with 16 bits.
    """
    _, source = source_of(architecture)
    recipe, config = Recipe(smoothquant=alpha, activations=bits), source.config
    (found,), _ = written(source, recipe, tmp_path / "checkpoint")
    inputs = observed(config, recipe, found, texts_for(config))
    for i in range(config.num_hidden_layers):
        prefix = f"transformer.layers.{i}."
        for names, norm in (
            (["attention.qkv"], "input_layernorm"),
            (["attention.dense"], None),
            (["mlp.fc", "mlp.gate"], "post_layernorm"),
            (["mlp.proj"], None),
        ):
            weights = {name: source[f"{prefix}{name}.weight"].float() for name in names}
            largest_weight = torch.cat(list(weights.values())).abs().amax(dim=0)
            largest_input = inputs[prefix + names[0]].abs().amax(dim=0)
            if norm:
                before = source[f"{prefix}{norm}.weight"].float()
                stored = found[f"{prefix}{norm}.weight"].float()
                divisor = before / stored
                s = (largest_input * divisor) ** alpha / largest_weight ** (1 - alpha)
                assert torch.allclose(stored, before / s, rtol=2**-8 + tolerance)  # a BF16 number
            else:
                divisor = found[f"{prefix}{names[0]}.smoother"][0]
                s = largest_input**alpha / largest_weight ** (1 - alpha)
                assert torch.allclose(divisor, s, rtol=tolerance)
            for name, weight in weights.items():
                codes, scale = quantize_rows(weight * divisor)
                assert torch.equal(found[f"{prefix}{name}.weight"], codes)
                assert torch.equal(found[f"{prefix}{name}.per_channel_scale"], scale)


@pytest.mark.parametrize("recipe", [Recipe(rotate=False), Recipe(), Recipe(activations=16)], ids=["8", "blocks", "16"])
def test_each_group_is_fitted_behind_the_layers_already_quantized(recipe, source_of, tmp_path):
    """The recorded errors are those at the inputs that the finished engine really has."""
    _, source = source_of("Qwen2ForCausalLM")
    config, texts = source.config, texts_for(source.config)
    (tensors,), quantizer = written(source, recipe, tmp_path / "checkpoint")
    inputs = observed(config, recipe, tensors, texts)
    other = observed(config, Recipe("none"), dict(source), texts)
    blocks = hadamard_blocks(config, recipe)
    q = rotation(config.hidden_size) if recipe.rotate else None
    distances = {"quantized": 0.0, "source": 0.0}
    for i in range(config.num_hidden_layers):
        layer = source.layer(i) if q is None else rotate_layer(config, i, source.layer(i), q)
        for name in (f"transformer.layers.{i}.attention.dense", f"transformer.layers.{i}.mlp.proj"):
            choice, block = quantizer.choices[name], blocks.get(name.split(".", 3)[-1], 0)
            assert torch.equal(tensors[f"{name}.smoother"][0], choice.smoother)
            weight = layer[f"{name}.weight"].float()
            for kind, x in (("quantized", inputs[name]), ("source", other[name])):
                error = Trial(x, weight, block, recipe.activations).error(choice.smoother)
                distances[kind] += abs(error - choice.error) / choice.error
    assert distances["quantized"] < 0.02  # of six groups: a tie may flip
    assert distances["source"] > 3 * distances["quantized"]


@pytest.mark.parametrize("block", [0, 16])
def test_gptq_is_fitted_to_the_codes_that_the_linear_will_read(block, source_of, tmp_path):
    """At the same inputs and smoother, the output error is below that of the codes nearest to the weights."""
    _, source = source_of("LlamaForCausalLM")
    config, recipe = source.config, Recipe(rotate=bool(block), rounding="gptq")
    (tensors,), _ = written(source, recipe, tmp_path / "checkpoint")
    inputs = observed(config, recipe, tensors, texts_for(config))
    q = rotation(config.hidden_size)
    name = "transformer.layers.1.mlp.proj"
    weight = (rotate_layer(config, 1, source.layer(1), q) if block else source.layer(1))[f"{name}.weight"].float()
    block = hadamard_blocks(config, recipe).get("mlp.proj", 0)
    s, x = tensors[f"{name}.smoother"][0], inputs[name]
    smoothed = weight * s
    codes, scale = quantize_rows(hadamard(smoothed, block) if block else smoothed)
    assert torch.equal(tensors[f"{name}.per_channel_scale"], scale)

    def error(codes: torch.Tensor) -> float:
        y = x / s
        y = hadamard(y, block) if block else y
        return float((y @ (codes * scale.T).T - x @ weight.T).norm())

    assert error(tensors[f"{name}.weight"]) < 0.9 * error(codes)


@pytest.mark.parametrize("rows", [8192, 50])
def test_a_quantized_head_is_stored_per_row(rows, source_of, tmp_path, monkeypatch):
    monkeypatch.setattr("quasar_trt.builders.quantize._ROWS", rows)
    _, source = source_of("MistralForCausalLM")
    (tensors,), _ = written(source, Recipe(rotate=False, lm_head="int8"), tmp_path / "checkpoint")
    codes, scale = quantize_rows(source["lm_head.weight"].float())
    assert torch.equal(tensors["lm_head.weight"], codes)
    assert torch.equal(tensors["lm_head.per_channel_scale"], scale)


def test_a_source_in_float32_gives_what_its_copy_in_bf16_gives(source_of):
    _, source = source_of("Qwen3ForCausalLM")
    config = source.config
    embedding = source["transformer.vocab_embedding.weight"]
    quantizers = [LayerQuantizer(config, Recipe(), embedding, texts_for(config)) for _ in range(2)]
    for i in range(config.num_hidden_layers):
        layer = source.layer(i)
        widened = {name: tensor.float() for name, tensor in layer.items()}
        first, second = quantizers[0](i, layer), quantizers[1](i, widened)
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert tensor.dtype == second[name].dtype and (to_numpy(tensor) == to_numpy(second[name])).all(), name


def test_the_layer_given_is_left_alone(source_of):
    _, source = source_of("LlamaForCausalLM")
    config = source.config
    quantizer = LayerQuantizer(config, Recipe(), source["transformer.vocab_embedding.weight"], texts_for(config))
    layer = source.layer(0)
    kept = {name: tensor.clone() for name, tensor in layer.items()}
    quantizer(0, layer)
    assert layer.keys() == kept.keys() and all(torch.equal(layer[name], tensor) for name, tensor in kept.items())


def test_the_report_counts_what_calibration_saw(source_of, tmp_path):
    model = tiny_llama(5)
    model.model.layers[0].input_layernorm.weight.data[4] = 0
    model.model.layers[1].mlp.gate_proj.weight.data[[2, 7]] = 0
    source = Converter(open_source(str(save_hf(model, tmp_path / "model"))))
    _, quantizer = written(source, Recipe(rotate=False), tmp_path / "checkpoint")
    report = quantizer.report()
    assert report["tokens"] == sum(TEXTS)
    # a dead input channel of qkv; two dead columns of mlp.proj, whose gate is always 0
    assert report["dead_channels"] == 3 and report["zero_rows"] == 2 and report["clamped_channels"] == 0
    assert all(ratio >= 20 and math.isfinite(ratio) for ratio in report["outliers"].values())
    assert quantizer.choices.keys() == {
        f"transformer.layers.{i}.{name}"
        for i in range(3)
        for name in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.proj")
    }


@pytest.mark.parametrize("name", ["default", "searched", "textbook", "nearest"])
def test_outputs_that_leave_float32_are_refused_by_name(name):
    config, tensors = checkpoint_tensors(tiny_llama(0))
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("transformer.layers.0.")}
    layer["transformer.layers.0.mlp.proj.weight"] = torch.full((48, 80), 3e38)
    embedding = tensors["transformer.vocab_embedding.weight"]
    quantizer = LayerQuantizer(config, RECIPES[name], embedding, texts_for(config))
    with pytest.raises(QuasarError, match=r"output of transformer\.layers\.0\.mlp\.proj; the model cannot be built"):
        quantizer(0, layer)


def test_inputs_that_leave_float32_are_refused_by_name_although_nothing_there_is_quantized():
    config, tensors = checkpoint_tensors(tiny_llama(0))
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("transformer.layers.0.")}
    layer["transformer.layers.0.mlp.fc.weight"] = torch.full((80, 48), 3e38)
    embedding = tensors["transformer.vocab_embedding.weight"]
    quantizer = LayerQuantizer(config, Recipe(exclude=("*",)), embedding, texts_for(config))
    with pytest.raises(QuasarError, match=r"input of transformer\.layers\.0\.mlp\.proj; the model cannot be built"):
        quantizer(0, layer)
