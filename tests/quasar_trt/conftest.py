"""Engine directories that the tests of the surface share: one tiny random model, built as INT8 and as BF16."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import save_hf, tiny_llama
from tiny_tokenizer import VOCAB_SIZE, save_tokenizer

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
