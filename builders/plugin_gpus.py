"""GPUs that the kernels of plugins are compiled for."""

from __future__ import annotations

from quasar_trt.errors import QuasarError


def check_plugin_gpu(sm: int, remedy: str) -> None:
    """Raises QuasarError for a GPU, by compute capability times ten, without kernels. remedy: what to use instead."""
    from quasar_trt.plugins.aot import PTX_VERSIONS

    if sm not in PTX_VERSIONS:
        known = ", ".join(map(str, PTX_VERSIONS))
        raise QuasarError(f"this GPU is SM {sm}; plugins are compiled for {known}: use {remedy}")
