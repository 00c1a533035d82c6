"""TensorRT-LLM: the target, its own files in an engine directory, and which of its releases can build and run them."""

from __future__ import annotations

import re

from quasar_trt.errors import QuasarError
from quasar_trt.machine import missing, version_of

LLM_TARGET = "tensorrt-llm"
# Below the engine directory: config.json, which has the name of our manifest, and `rank{r}.engine`, as its build leaves them and
# its executor, server and tools take them.
LLM_DIRECTORY = "tensorrt_llm"
_OLDEST, _GONE = (1, 0), (1, 3)  # releases that have the engine backend, and the first without it


def llm_release() -> str:
    """The installed release, which has the engine backend. Raises QuasarError with the line that mends it."""
    release = version_of(LLM_TARGET)
    if release is None:
        raise QuasarError(f"the package {LLM_TARGET} is needed: {missing(LLM_TARGET)}")
    number = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if not _OLDEST <= number < _GONE:
        raise QuasarError(
            f"{LLM_TARGET} {release} has no TensorRT engine backend that is known here: install {LLM_TARGET} 1.2.1, the last "
            "release with it (1.0.0 for CUDA 12), or build with --target tensorrt"
        )
    return release
