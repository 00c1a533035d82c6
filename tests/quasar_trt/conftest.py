"""Engine directories that the tests of the surface share: one tiny random model, built as INT8 and as BF16."""

from __future__ import annotations

from pathlib import Path

import pytest
from heads import eagle_tensors, eagle_values, medusa_tensors, write_eagle, write_medusa
from tiny import save_hf, tiny_llama
from tiny_tokenizer import VOCAB_SIZE, save_tokenizer

from quasar_trt.checkpoint import Checkpoint
from quasar_trt.recipe import Recipe


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory) -> Path:
    """The model as a Hugging Face directory with a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    save_hf(tiny_llama(vocab_size=VOCAB_SIZE, eos_token_id=VOCAB_SIZE - 1), directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def engine_dirs(hf_dir, tmp_path_factory) -> dict[str, Path]:
    """{"INT8": ..., "BF16": ...}; read-only for tests."""
    from quasar_trt.builders.build import build

    root = tmp_path_factory.mktemp("engines")
    directories = {}
    calibration = {"calib_size": 2, "calib_max_seq_length": 16}
    for weights, recipe, options in (("INT8", Recipe(), calibration), ("BF16", Recipe("none"), {})):
        directories[weights] = root / weights.lower()
        build(str(hf_dir), directories[weights], recipe, progress=False, **options)
    return directories


@pytest.fixture(scope="session")
def head_dirs(engine_dirs, tmp_path_factory) -> dict[str, Path]:
    """{"medusa", "eagle"}: random heads for the model of `engine_dirs`."""
    root = tmp_path_factory.mktemp("heads")
    config = Checkpoint.open(engine_dirs["BF16"] / "checkpoint").config
    values = eagle_values(config)
    write_eagle(root / "eagle", values, eagle_tensors(config, False, values))
    return {"medusa": write_medusa(root / "medusa", medusa_tensors(config, 3, 1), 3, 1), "eagle": root / "eagle"}


@pytest.fixture(scope="session")
def deep_model():
    """A model of enough layers for every head; its hidden_size is no multiple of 16."""
    return tiny_llama(5, num_hidden_layers=7, hidden_size=42, intermediate_size=56, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def deep_dirs(deep_model, tmp_path_factory) -> dict[str, Path]:
    """{"INT8" (rotated), "BF16"} engines of it; read-only for tests."""
    from quasar_trt.builders.build import build

    root = tmp_path_factory.mktemp("deep")
    save_hf(deep_model, root / "model")
    save_tokenizer(root / "model")
    recipes = {"INT8": (Recipe(), {"calib_size": 2, "calib_max_seq_length": 16}), "BF16": (Recipe("none"), {})}
    for name, (recipe, options) in recipes.items():
        build(str(root / "model"), root / name, recipe, progress=False, **options)
    return {name: root / name for name in recipes}


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's client of the `server` that a module has."""
    with server.client() as client:
        yield client
