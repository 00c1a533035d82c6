"""Speculative decoding whose verifier is a smoothed INT8 engine.

`Runner` (for servers `AsyncRunner`) and `SamplingParams` are all a program needs; they load on first use, so importing the package is quick and needs
neither torch nor a GPU stack.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "AsyncRunner": "quasar_trt.async_runner",
    "Runner": "quasar_trt.runner",
    "SamplingParams": "quasar_trt.sampling_params",
    "QuasarError": "quasar_trt.errors",
}
__all__ = ["AsyncRunner", "QuasarError", "Runner", "SamplingParams", "__version__"]


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'quasar_trt' has no attribute '{name}'")
