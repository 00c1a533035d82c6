"""A double of the module `tensorrt` as far as a build touches it: its networks are recorded, its plans are a few bytes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import tensorrt_rtx
from recorded_network import RecordedNetwork


class _Config:
    """A builder's configuration."""

    def __init__(self):
        self.profiles = []
        self.add_optimization_profile = self.profiles.append

    def create_timing_cache(self, content: bytes):
        return SimpleNamespace(serialize=lambda: content + b"timed")

    def set_timing_cache(self, cache, ignore_mismatch):
        assert not ignore_mismatch
        self._cache = cache

    def get_timing_cache(self):
        return self._cache


class TensorRTBuilderDouble(ModuleType):
    """networks: every network that was compiled; profiles: [binding -> shapes] of each."""

    __version__ = "10.15.1"

    def __init__(self):
        super().__init__("tensorrt")
        for name in dir(tensorrt_rtx):
            if name != "ComputeCapability" and not name.startswith("__"):  # TensorRT compiles for its own GPU only
                setattr(self, name, getattr(tensorrt_rtx, name))
        self.networks, self.profiles = [], []
        self.Builder = lambda logger: SimpleNamespace(
            create_network=lambda flags: RecordedNetwork(self),
            create_builder_config=_Config,
            create_optimization_profile=self._profile,
            build_serialized_network_to_stream=self._build,
        )

    def install(self, monkeypatch) -> None:
        """As the module `tensorrt`, with our plugins registered; an operation is (name, inputs, attributes)."""
        operations = ("smooth_quantize", "rms_norm_quantize", "silu_mul_smooth_quantize", "linear", "linear_bias")
        described = SimpleNamespace(**{name: self._operation(name) for name in operations})
        plugin = ModuleType("tensorrt.plugin")
        plugin.op = SimpleNamespace(quasar=described)
        monkeypatch.setitem(sys.modules, "tensorrt", self)
        monkeypatch.setitem(sys.modules, "tensorrt.plugin", plugin)
        monkeypatch.setitem(sys.modules, "quasar_trt.plugins.tensorrt", ModuleType("quasar_trt.plugins.tensorrt"))

    @staticmethod
    def _operation(name: str):
        return lambda *inputs, **attributes: (name, inputs, attributes)

    def _profile(self):
        shapes = {}
        return SimpleNamespace(
            shapes=shapes,
            set_shape=lambda name, *three: shapes.update({name: three}),
            set_shape_input=lambda name, *three: shapes.update({name: three}),
        )

    def _build(self, network, config, writer) -> bool:
        self.networks.append(network)
        self.profiles += [profile.shapes for profile in config.profiles]
        return writer.write(b"a plan") == 6
