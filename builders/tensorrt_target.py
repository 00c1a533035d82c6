"""Compiles a checkpoint into TensorRT plans: with TensorRT-RTX for any GPUs, on a machine without one; with TensorRT for the
machine's own GPU, with the operations of `quasar_trt.plugins` as plugins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from quasar_trt.builders.network.decoder import DecoderNetwork
from quasar_trt.builders.network.lowering import Plugin, lowering_of
from quasar_trt.builders.network.writer import AddPlugin, NetworkWriter
from quasar_trt.builders.quantize import with_int8_head
from quasar_trt.builders.timing_cache import TimingCache
from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.plan_bindings import PassSizes, PlanSizes
from quasar_trt.engines.reference import load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Limits
from quasar_trt.model_config import ModelConfig
from quasar_trt.plan import PLAN_HEADER, Plan, plan_name
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import FileRecord, to_numpy
from quasar_trt.tensorrt_stack import load_stack, quiet_logger

_PREFILL_ROWS = 128  # as many for every slot are what the plan's work space holds


def compile_plans(
    target: str,
    config: ModelConfig,
    recipe: Recipe,
    limits: Limits,
    sms: Sequence[int],
    directory: Path,
    advance: Callable[[int], None],
) -> tuple[Plan, dict[str, FileRecord]]:
    """Compiles the checkpoint of each rank in `directory` into a plan beside it for each of `sms`; calls `advance(1)` after each.

    config: of one rank. The network refers to the mapped checkpoint, and the plan goes to its file as it is made. Raises
    QuasarError, with the first error that the compiler told, when it fails.
    """
    trt = load_stack(target)
    sizes = PlanSizes(limits, min(_PREFILL_ROWS, limits.max_seq_len))
    logger = quiet_logger(trt)
    builder = trt.Builder(logger)
    lowering = lowering_of(recipe, takes_plugins=target == "tensorrt")
    files = {}
    for rank in range(config.tp_size):
        tensors = load_tensors(directory / "checkpoint" / f"rank{rank}.safetensors")
        tensors = {name: to_numpy(tensor) for name, tensor in with_int8_head(tensors, recipe).items()}
        for sm in sms:
            network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
            writer = NetworkWriter(trt, network, _plugins(sm) if lowering is Plugin else None)
            DecoderNetwork(writer, config, recipe, tensors, sizes.capacity).write()
            made = builder.create_builder_config()
            for usual, largest in _profiles(target, sizes):
                made.add_optimization_profile(_profile(builder, config, sizes.capacity, usual, largest))
            if target == "tensorrt":
                timing_cache = TimingCache(made, f"{target}-{trt.__version__}-sm{sm}")
            else:  # which times nothing
                made.num_compute_capabilities = 1
                made.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
            name = plan_name(sm, rank)
            plan = _plan_writer(trt, directory / name)
            with plan.file:
                done = builder.build_serialized_network_to_stream(network, made, plan)
            if plan.failure:
                raise plan.failure
            if not done:
                raise QuasarError(f"{target} cannot compile this model for SM {sm}: {logger.first_error}")
            if target == "tensorrt":
                timing_cache.save()
            files[name] = plan.record()
            advance(1)
    return Plan(target, trt.__version__, tuple(sms), lowering.name, sizes.prefill_rows), files


def _plugins(sm: int) -> AddPlugin:
    """Adds operations of `quasar_trt.plugins` with their kernels for one GPU."""
    from tensorrt.plugin import op

    import quasar_trt.plugins.tensorrt  # noqa: F401 (registers them)

    def add(network, operation: str, inputs: Sequence[object], attributes: dict) -> list[object]:
        layer = network.add_plugin(getattr(op.quasar, operation)(*inputs, **attributes, sm=sm), aot=True)
        return [layer.get_output(i) for i in range(layer.num_outputs)]

    return add


def _profiles(target: str, sizes: PlanSizes) -> list[tuple[PassSizes, PassSizes]]:
    """The usual and the largest pass of each optimization profile.

    TensorRT chooses its kernels by the usual pass of each, and takes memory for the largest. TensorRT-RTX makes them for the
    shapes that come, and would hold every kernel once for each profile.
    """
    if target == "tensorrt":
        return [(most, most) for most in sizes.profiles]
    return [(sizes.verify, sizes.largest)]


def _profile(builder, config: ModelConfig, capacity: int, usual: PassSizes, largest: PassSizes):
    profile = builder.create_optimization_profile()
    for name, shapes in _shapes(config, capacity, (PassSizes(1, 1, 1), usual, largest)).items():
        profile.set_shape(name, *shapes)
    profile.set_shape_input(bindings.SPAN, (1,), (capacity,), (capacity,))
    return profile


def _shapes(config: ModelConfig, capacity: int, every: Sequence[PassSizes]) -> dict[str, list[tuple[int, ...]]]:
    """Binding -> its shape in each of the passes."""
    shapes = {
        bindings.INPUT_IDS: [(most.batch, most.rows) for most in every],
        bindings.POSITIONS: [(most.batch, most.rows) for most in every],
        bindings.PAST_LENGTHS: [(most.batch,) for most in every],
        bindings.VISIBLE: [(most.batch, 1, most.rows, most.rows + 2) for most in every],
        bindings.LOGITS_ROWS: [(most.wanted,) for most in every],
    }
    slot = (config.num_key_value_heads, capacity, config.head_size)
    for i in range(config.num_hidden_layers):
        for past, _ in bindings.cache_bindings(i):
            shapes[past] = [(most.batch, *slot) for most in every]
    return shapes


def _plan_writer(trt: ModuleType, path: Path):
    class PlanWriter(trt.IStreamWriter):
        """Writes and hashes a plan as it comes. failure: why it cannot; the compiler takes an exception for success."""

        def __init__(self):
            trt.IStreamWriter.__init__(self)
            self.file = open(path, "wb")  # noqa: SIM115 (closed by who writes)
            self.failure: OSError | None = None
            self._hash = hashlib.sha256()
            self._header = b""
            self._size = 0

        def write(self, data: bytes) -> int:
            try:
                self.file.write(data)
                self.file.flush()
            except OSError as error:
                self.failure = error
                return 0
            self._hash.update(data)
            self._header += data[: PLAN_HEADER - len(self._header)]
            self._size += len(data)
            return len(data)

        def record(self) -> FileRecord:
            return FileRecord(self._size, self._hash.hexdigest(), hashlib.sha256(self._header).hexdigest())

    return PlanWriter()
