"""The searched smoothing: never worse than the textbook's on its own criterion, finite on dead channels, repeatable."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import checkpoint_tensors, random_ids, save_hf, tiny_llama

from quasar_trt.builders import search
from quasar_trt.builders.build import build
from quasar_trt.builders.calibrate import ChannelMaxima
from quasar_trt.builders.quantize import quantize_rows
from quasar_trt.builders.search import Trial, choose, input_statistics, search_smoothers
from quasar_trt.builders.smooth import smoother
from quasar_trt.builders.write_checkpoint import smoothed_layer
from quasar_trt.checkpoint import Checkpoint
from quasar_trt.engines.reference import ReferenceModel, load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.plugins.reference import smooth_quantize, w8a8_linear
from quasar_trt.recipe import Recipe


def outlier_input(rows: int = 96, columns: int = 128, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.rand(columns, generator=generator).add(0.1)
    x[:, 7] *= 100
    return x, torch.randn(64, columns, generator=generator) * 0.05


def test_the_statistics_are_what_they_say():
    x = torch.tensor([[3.0, -1.0]] * 99 + [[-4.0, 100.0]])
    found = input_statistics(x, x)
    assert found["max"].tolist() == [4.0, 100.0]
    assert found["3rms"].tolist() == pytest.approx([3 * (9.07) ** 0.5, 3 * (100.99) ** 0.5])
    assert found["p99"].tolist() == [3.0, 1.0]


def test_the_error_is_that_of_the_engines_arithmetic():
    x, weight = outlier_input()
    s = smoother(x.abs().amax(0), weight.abs().amax(0), 0.5)
    exact = x @ weight.T
    codes, scale = quantize_rows(weight * s)
    found = w8a8_linear(*smooth_quantize(x, 1 / s), codes, scale, None)
    expected = float((found - exact).norm() / exact.norm())
    assert Trial(x, weight).error(s) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_never_worse_than_the_textbook(seed):
    x, weight = outlier_input(seed=seed)
    if seed % 2:
        x[5, 40:60] *= 30  # a row that the maximum heeds and the others need not
    textbook = smoother(x.abs().amax(0), weight.abs().amax(0), 0.5)
    choice = choose(x, weight)
    assert choice.error <= Trial(x, weight).error(textbook)
    sizes = input_statistics(x, x)[choice.statistic]
    assert torch.equal(choice.smoother, smoother(sizes, weight.abs().amax(0), choice.alpha))
    assert choice.error == Trial(x, weight).error(choice.smoother)


@pytest.mark.parametrize("statistic", ["max", "3rms", "p99"])
@pytest.mark.parametrize("alpha", search.ALPHAS)
def test_every_exponent_and_statistic_can_be_chosen(monkeypatch, alpha, statistic):
    x, weight = outlier_input(rows=200)  # enough for the 99th percentile to differ from the maximum
    wanted = input_statistics(x, x)[statistic]
    monkeypatch.setattr(search, "smoother", lambda sizes, columns, exponent: (sizes, exponent))
    monkeypatch.setattr(Trial, "error", lambda self, s: abs(s[1] - alpha) + (not torch.equal(s[0], wanted)))
    choice = choose(x, weight)
    assert (choice.statistic, choice.alpha, choice.error) == (statistic, alpha, 0)


def test_more_rows_than_are_judged_are_still_seen_by_the_maximum():
    x, weight = outlier_input(rows=2 * search._ROWS + 3)
    x[1, 3] = 1e4  # not among the judged rows
    assert input_statistics(x, x[::2])["max"][3] == 1e4
    assert torch.isfinite(choose(x, weight).smoother).all()


def test_dead_channels_and_zero_rows_stay_finite():
    x, weight = outlier_input()
    x[:, 3], weight[:, 9], weight[11] = 0, 0, 0
    x[4] = 0
    choice = choose(x, weight)
    assert choice.smoother[3] == choice.smoother[9] == 1
    assert torch.isfinite(choice.smoother).all() and (choice.smoother > 0).all()
    assert 0 < choice.error < 0.05
    silent = choose(torch.zeros_like(x), weight)
    assert (silent.error, silent.statistic, silent.alpha) == (0.0, "max", 0.5)
    assert choose(x, torch.zeros_like(weight)).error == 0


def test_outputs_that_leave_float32_are_refused_by_name():
    config, tensors = checkpoint_tensors(tiny_llama(0))
    tensors["transformer.layers.1.mlp.proj.weight"].fill_(3e38)
    with pytest.raises(QuasarError, match=r"output of transformer\.layers\.1\.mlp\.proj; the model cannot be built"):
        search_smoothers(config, tensors, [random_ids(config, 32)], lambda count: None)


@pytest.fixture(scope="module")
def searched():
    """(config, tensors, texts, choices, observer) of a tiny model with a dead channel and texts of two lengths."""
    config, tensors = checkpoint_tensors(tiny_llama(5, attention_bias=True))
    tensors["transformer.layers.0.input_layernorm.weight"][4] = 0
    texts = [random_ids(config, length, seed=length) for length in (48, 31)]
    steps = []
    choices, observer = search_smoothers(config, tensors, texts, steps.append)
    assert steps == [1, 1, 1]
    return config, tensors, texts, choices, observer


def test_each_group_is_fitted_behind_the_layers_already_quantized(searched):
    """The inputs that the search saw are those of the quantized model over the same texts."""
    config, tensors, texts, choices, observer = searched
    assert len(choices) == 4 * config.num_hidden_layers
    assert observer.rows == 79
    assert observer.report()["dead_channels"] == 1
    smoothers = {name: choice.smoother for name, choice in choices.items()}
    quantized = dict(tensors)
    for i in range(config.num_hidden_layers):
        quantized |= smoothed_layer(config, tensors, smoothers, i)
    seen = ChannelMaxima()
    model = ReferenceModel(config, Recipe(), quantized, observe=seen)
    model.hidden_states([(ids, model.new_cache()) for ids in texts])
    for name in ("transformer.layers.2.attention.dense", "transformer.layers.2.mlp.proj"):
        assert torch.allclose(seen.maxima[name], observer.maxima[name], rtol=0.02, atol=0.02)
    plain = ChannelMaxima()
    model = ReferenceModel(config, Recipe("none"), tensors, observe=plain)
    model.hidden_states([(ids, model.new_cache()) for ids in texts])
    name = "transformer.layers.2.mlp.proj"
    assert not torch.equal(plain.maxima[name], observer.maxima[name])


def test_the_pass_leaves_the_tensors_alone_and_repeats_itself(searched):
    config, tensors, texts, choices, _ = searched
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    again, _ = search_smoothers(config, tensors, texts, lambda count: None)
    assert {name: choice.report() for name, choice in again.items()} == {
        name: choice.report() for name, choice in choices.items()
    }
    assert all(torch.equal(again[name].smoother, choice.smoother) for name, choice in choices.items())
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


@pytest.fixture(scope="module")
def engine_dirs(tmp_path_factory):
    root = tmp_path_factory.mktemp("search")
    model = save_hf(tiny_llama(2), root / "model")
    for name, recipe in {"searched": Recipe(), "textbook": Recipe(smoothquant=0.5)}.items():
        build(str(model), root / name, recipe, calib_size=4, calib_max_seq_length=32, progress=False)
    return root


def test_what_was_chosen_is_recorded(engine_dirs):
    groups = json.loads((engine_dirs / "searched" / "fidelity.json").read_text())["groups"]
    assert len(groups) == 4 * 3
    for group in groups.values():
        assert group["alpha"] in search.ALPHAS
        assert group["statistic"] in ("max", "3rms", "p99")
        assert 0 < group["error"] < 0.1
    assert "groups" not in json.loads((engine_dirs / "textbook" / "fidelity.json").read_text())
    described = json.loads((engine_dirs / "searched" / "checkpoint" / "config.json").read_text())
    assert described["quantization"]["smoothquant_val"] == 0.5
    assert Checkpoint.open(engine_dirs / "searched" / "checkpoint").recipe.smoothquant is None
    assert Checkpoint.open(engine_dirs / "textbook" / "checkpoint").recipe.smoothquant == 0.5


def test_an_exponent_gives_the_textbook_recipe(engine_dirs):
    """Written out here: maxima of the unquantized model over the calibration texts, one exponent, folded, rounded."""
    from quasar_trt.builders.convert import convert
    from quasar_trt.builders.self_text import new_texts, source_engine, write
    from quasar_trt.builders.source import open_source

    source = open_source(str(engine_dirs / "model"))
    config, tensors = source.config, convert(source, lambda count: None)
    texts = new_texts(None, config.vocab_size, 4, 32, 0)
    with source_engine(config, tensors, 32, engine_dirs) as engine:
        write(engine, texts, lambda count: None)
    observer = ChannelMaxima()
    model = ReferenceModel(config, Recipe("none"), tensors, observe=observer)
    model.hidden_states([(text.ids, model.new_cache()) for text in texts])
    found = load_tensors(engine_dirs / "textbook" / "checkpoint" / "rank0.safetensors")
    for i in range(config.num_hidden_layers):
        prefix = f"transformer.layers.{i}."
        for norm, names in {
            "input_layernorm": ["attention.qkv"],
            None: ["mlp.proj"],
            "post_layernorm": ["mlp.fc", "mlp.gate"],
        }.items():
            weights = {name: tensors[f"{prefix}{name}.weight"].float() for name in names}
            s = (observer.maxima[prefix + names[0]] / torch.cat(list(weights.values())).abs().amax(0)) ** 0.5
            if norm:
                weight = tensors[f"{prefix}{norm}.weight"].float()
                stored = found[f"{prefix}{norm}.weight"]
                assert torch.allclose(stored.float(), weight / s, rtol=0.004)
                s = weight / stored.float()
            else:
                assert torch.allclose(found[f"{prefix}{names[0]}.smoother"][0], s, rtol=1e-5)
                s = found[f"{prefix}{names[0]}.smoother"][0]
            for name, weight in weights.items():
                codes, scale = quantize_rows(weight * s)
                assert torch.equal(found[f"{prefix}{name}.weight"], codes)
                assert torch.equal(found[f"{prefix}{name}.per_channel_scale"], scale)
