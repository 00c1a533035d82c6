"""A build holds one layer of its source at a time, and no part of the vocabulary beside it."""

from __future__ import annotations

import pytest
from tiny import save_hf, tiny_llama
from watched_source import WatchedSource

from quasar_trt.builders import build as build_module
from quasar_trt.builders.build import build
from quasar_trt.recipe import Recipe

RECIPES = {
    "default": Recipe(),
    "textbook": Recipe(smoothquant=0.5),
    "mixed": Recipe(rotate=False, exclude=("transformer.layers.1.*", "*.mlp.proj"), lm_head="int8"),
    "none": Recipe("none"),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_one_layer_of_the_source_is_in_memory_at_a_time(name, engine, tmp_path, monkeypatch):
    model = str(save_hf(tiny_llama(1, num_hidden_layers=5, attention_bias=True, mlp_bias=True), tmp_path / "model"))
    original, sources = build_module.open_source, []

    def open_source(*arguments, **options):
        sources.append(WatchedSource(original(*arguments, **options)))
        return sources[-1]

    monkeypatch.setattr(build_module, "open_source", open_source)
    monkeypatch.setattr("quasar_trt.builders.self_text.default_engine", lambda: engine)
    calibration = {"calib_size": 2, "calib_max_seq_length": 16} if RECIPES[name].quantized else {}
    build(model, tmp_path / "out", RECIPES[name], progress=False, **calibration)
    (source,) = sources
    assert set(source.read) == set(source.names)
    crowded = {parts for parts in source.together if len(parts) > 1}
    assert crowded <= {frozenset({"model.norm.weight", "lm_head.weight"})}  # the norm is folded into the head
    assert source.alive() == frozenset()
