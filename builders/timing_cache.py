"""TensorRT's timings of kernels, kept from one build to the next."""

from __future__ import annotations

from quasar_trt.user_cache import cache_path, read_cache, write_cache


class TimingCache:
    """Gives `config`, an IBuilderConfig, the timings that an earlier build with the same `name` saved; what TensorRT cannot use
    of them it ignores."""

    def __init__(self, config, name: str):
        self._path = cache_path("timing", f"{name}.cache")
        self._config = config
        config.set_timing_cache(config.create_timing_cache(read_cache(self._path) or b""), ignore_mismatch=False)

    def save(self) -> None:
        write_cache(self._path, bytes(self._config.get_timing_cache().serialize()))
