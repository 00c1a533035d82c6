"""TensorRT's timings of kernels, kept from one build to the next."""

from __future__ import annotations

import os
from pathlib import Path


class TimingCache:
    """Gives `config`, an IBuilderConfig, the timings that an earlier build with the same `name` saved in the user's cache
    directory; what TensorRT cannot use there it ignores."""

    def __init__(self, config, name: str):
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._path = Path(root) / "quasar-trt" / "timing" / f"{name}.cache"
        self._config = config
        try:
            known = self._path.read_bytes()
        except OSError:
            known = b""
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)

    def save(self) -> None:
        """Whole or not at all; not at all where the user's files cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._path.with_suffix(f".{os.getpid()}")
            beside.write_bytes(self._config.get_timing_cache().serialize())
            os.replace(beside, self._path)
        except OSError:
            return
