"""Compiles a checkpoint into TensorRT plans: with TensorRT-RTX for any GPUs, on a machine without one; with TensorRT for the
machine's own GPU, with the operations of `quasar_trt.plugins` as plugins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from quasar_trt.builders.network.decoder import DecoderNetwork
from quasar_trt.builders.network.writer import AddPlugin, NetworkWriter
from quasar_trt.builders.timing_cache import TimingCache
from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.plan_bindings import PassSizes, PlanSizes
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Limits
from quasar_trt.model_config import ModelConfig
from quasar_trt.plan import PLAN_HEADER, Plan, plan_name
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import FileRecord, map_tensors
from quasar_trt.tensorrt_stack import load_stack, quiet_logger

_PREFILL_ROWS = 128  # as many for every slot are what the plan's work space holds


def check_target(target: str, recipe: Recipe, tp_size: int, sms: Sequence[int]) -> tuple[int, ...]:
    """The GPUs to compile for, of a target that is the name of its stack. Raises QuasarError for what it cannot compile."""
    trt = load_stack(target)
    if tp_size != 1:
        raise QuasarError(f"tp_size is {tp_size}; target '{target}' allows 1")
    if recipe.lm_head == "rescored":
        raise QuasarError(f"lm_head is 'rescored'; target '{target}' allows bf16, int8")
    if target == "tensorrt":
        if recipe.quantized:
            load_stack("triton")  # which compiles the kernels of the plugins
        return _own_gpu(sms)
    known = [int(name[2:]) for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    unknown = [sm for sm in sms if sm not in known]
    if unknown or not sms:
        found = f"sm is {', '.join(map(str, unknown))}" if unknown else "sm is missing"
        raise QuasarError(
            f"{found}; {target} {trt.__version__} compiles for {', '.join(map(str, known))}: give one or more with --sm"
        )
    if recipe.activations == 8:
        raise QuasarError(
            f"activations is 8; target '{target}' cannot hold the plugins that quantize them per token: use 16, which "
            "keeps INT8 weights and computes with BF16 activations"
        )
    return tuple(dict.fromkeys(sms))


def _own_gpu(sms: Sequence[int]) -> tuple[int]:
    from quasar_trt.engines.cuda_device import CudaDevice

    device = CudaDevice()
    if sms and set(sms) != {device.sm}:
        raise QuasarError(
            f"sm is {', '.join(map(str, sms))}; target 'tensorrt' compiles for the machine's own GPU, {device.name}, SM "
            f"{device.sm}: leave it out, or build there"
        )
    return (device.sm,)


def compile_plans(
    target: str,
    config: ModelConfig,
    recipe: Recipe,
    limits: Limits,
    sms: Sequence[int],
    directory: Path,
    advance: Callable[[int], None],
) -> tuple[Plan, dict[str, FileRecord]]:
    """Compiles the checkpoint in `directory` (one rank) into a plan beside it for each of `sms`; calls `advance(1)` after each.

    The network refers to the mapped checkpoint, and the plan goes to its file as it is made. Raises QuasarError, with the
    first error that the compiler told, when it fails.
    """
    trt = load_stack(target)
    sizes = PlanSizes(limits, min(_PREFILL_ROWS, limits.max_seq_len))
    tensors = map_tensors(directory / "checkpoint" / "rank0.safetensors")
    logger = quiet_logger(trt)
    builder = trt.Builder(logger)
    files = {}
    for sm in sms:
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        writer = NetworkWriter(trt, network, _plugins(sm) if target == "tensorrt" else None)
        decoder = DecoderNetwork(writer, config, recipe, tensors, sizes.capacity)
        decoder.write()
        made = _builder_config(trt, builder, config, sizes)
        if target == "tensorrt":
            timing_cache = TimingCache(made, f"{target}-{trt.__version__}-sm{sm}")
        else:  # where nothing is timed
            made.num_compute_capabilities = 1
            made.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
        plan = _plan_writer(trt, directory / plan_name(sm))
        with plan.file:
            done = builder.build_serialized_network_to_stream(network, made, plan)
        if not done:
            raise QuasarError(f"{target} cannot compile this model for SM {sm}: {logger.first_error}")
        if target == "tensorrt":
            timing_cache.save()
        files[plan_name(sm)] = plan.record()
        advance(1)
    return Plan(target, trt.__version__, tuple(sms), decoder.linears.name, sizes.prefill_rows), files


def _plugins(sm: int) -> AddPlugin:
    """Adds operations of `quasar_trt.plugins` with their kernels for one GPU."""
    from tensorrt.plugin import op

    import quasar_trt.plugins.tensorrt  # noqa: F401 (registers them)

    def add(network, operation: str, inputs: Sequence[object], attributes: dict) -> list[object]:
        layer = network.add_plugin(getattr(op.quasar, operation)(*inputs, **attributes, sm=sm), aot=True)
        return [layer.get_output(i) for i in range(layer.num_outputs)]

    return add


def _builder_config(trt: ModuleType, builder, config: ModelConfig, sizes: PlanSizes):
    """One profile: with a second one for prompts TensorRT-RTX, which makes its kernels for the shapes that come, would hold every
    kernel twice."""
    made = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for name, shapes in _shapes(config, sizes).items():
        profile.set_shape(name, *shapes)
    profile.set_shape_input(bindings.SPAN, (1,), (sizes.capacity,), (sizes.capacity,))
    made.add_optimization_profile(profile)
    return made


def _shapes(config: ModelConfig, sizes: PlanSizes) -> dict[str, list[tuple[int, ...]]]:
    """Binding -> its smallest, usual and largest shape."""
    every = (PassSizes(1, 1, 1), sizes.verify, sizes.largest)
    shapes = {
        bindings.INPUT_IDS: [(most.batch, most.rows) for most in every],
        bindings.POSITIONS: [(most.batch, most.rows) for most in every],
        bindings.PAST_LENGTHS: [(most.batch,) for most in every],
        bindings.KEY_VALUE_LENGTHS: [(most.batch,) for most in every],
        bindings.LOGITS_ROWS: [(most.wanted,) for most in every],
    }
    slot = (config.num_key_value_heads, sizes.capacity, config.head_size)
    for i in range(config.num_hidden_layers):
        for past, _ in bindings.cache_bindings(i):
            shapes[past] = [(most.batch, *slot) for most in every]
    return shapes


def _plan_writer(trt: ModuleType, path: Path):
    class PlanWriter(trt.IStreamWriter):
        """Writes and hashes a plan as it comes."""

        def __init__(self):
            trt.IStreamWriter.__init__(self)
            self.file = open(path, "wb")  # noqa: SIM115 (closed by who writes)
            self._hash = hashlib.sha256()
            self._header = b""
            self._size = 0

        def write(self, data: bytes) -> int:
            self.file.write(data)
            self._hash.update(data)
            self._header += data[: PLAN_HEADER - len(self._header)]
            self._size += len(data)
            return len(data)

        def record(self) -> FileRecord:
            return FileRecord(self._size, self._hash.hexdigest(), hashlib.sha256(self._header).hexdigest())

    return PlanWriter()
