"""What an engine can be built for, and what each target allows and does where nothing else is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from quasar_trt.builders.plugin_gpus import check_plugin_gpu
from quasar_trt.builders.tensorrt_llm_target import LlmHost, check_llm_target
from quasar_trt.errors import QuasarError, unknown
from quasar_trt.machine import available_memory, total_memory
from quasar_trt.plan import PLAN_TARGETS
from quasar_trt.recipe import Recipe
from quasar_trt.tensorrt_llm_stack import LLM_TARGET
from quasar_trt.tensorrt_stack import load_stack

# Target -> options of its recipes where these are quantized, but for those of `Recipe` itself. No plan has run yet: until it is known
# what rescoring costs there, the head is the one that needs no proof.
_DEFAULTS: dict[str, dict[str, object]] = {
    "cpu": {},
    "tensorrt": {"lm_head": "bf16"},
    "tensorrt-rtx": {"lm_head": "bf16", "activations": 16},
    LLM_TARGET: {"lm_head": "bf16"},
}

# What compiles: GPUs to compile plans for, a machine for TensorRT-LLM's engines, or why it is none. Nothing for the CPU.
Compiler = tuple[int, ...] | LlmHost | QuasarError


def target_recipe(target: str, **options: object) -> Recipe:
    """The recipe with these options for a target; None is what the target does. Raises QuasarError as `Recipe` does."""
    given = {name: value for name, value in options.items() if value is not None}
    defaults = dict(_DEFAULTS.get(target, {})) if given.get("quantization") != "none" else {}
    if given.get("static_activations"):
        defaults.pop("activations", None)
    return Recipe(**defaults | given)


def check_target(target: str, recipe: Recipe, tp_size: int, sms: Sequence[int]) -> Compiler:
    """What compiles; GPUs are given and returned by compute capability times ten.

    Raises QuasarError for a target that is unknown or whose stack is not installed, and for what it cannot compile.
    """
    if target in PLAN_TARGETS:
        return _check_plan(target, recipe, tp_size, sms)
    if target == LLM_TARGET:
        return check_llm_target(recipe, sms)
    if target != "cpu":
        raise unknown("target", target, _DEFAULTS)
    if sms:
        raise QuasarError(f"sm is {_text(sms)}; target 'cpu' has no use for it: leave it out, or choose a target")
    if recipe.static_activations:
        raise QuasarError(
            f"target 'cpu' has scales for each token, which lose less than static ones: leave static_activations out, or "
            f"choose a target of {', '.join(PLAN_TARGETS)}"
        )
    return ()


def _check_plan(target: str, recipe: Recipe, tp_size: int, sms: Sequence[int]) -> tuple[int, ...]:
    trt = load_stack(target)
    if tp_size != 1 and not hasattr(trt, "CollectiveOperation"):
        raise QuasarError(
            f"tp_size is {tp_size}; {target} {trt.__version__} allows 1, several ranks need 11 or later: update it"
        )
    per_token = recipe.quantized and not recipe.static_activations
    if target == "tensorrt":
        if per_token:
            load_stack("triton")  # which compiles the kernels of the plugins
        (sm,) = _own_gpu(sms)
        if per_token:
            check_plugin_gpu(sm, "one of these, or static_activations, which needs no plugins")
        return (sm,)
    known = [int(name[2:]) for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    unknown_sms = [sm for sm in sms if sm not in known]
    if unknown_sms or not sms:
        found = f"sm is {_text(unknown_sms)}" if unknown_sms else "sm is missing"
        raise QuasarError(
            f"{found}; {target} {trt.__version__} compiles for {_text(known)}: give one or more with --sm"
        )
    if per_token and recipe.activations == 8:
        raise QuasarError(
            f"activations is 8; target '{target}' cannot hold the plugins that quantize them per token: use 16, which "
            "keeps INT8 weights and computes with BF16 activations, or static_activations"
        )
    return tuple(dict.fromkeys(sms))


def check_memory(target: str, needed: int, gpu_needed: int) -> None:
    """Refuses what would take more memory to build than this machine or its control group has, to compile as a plan than is
    available, or, of a target that compiles for its own GPU, more to run than that has free; bytes, as `estimate` says."""
    if needed > (total := total_memory()):
        raise QuasarError(
            f"building this model takes about {needed / 1e9:.1f} GB of memory, this machine has {total / 1e9:.1f} GB; build on a larger "
            "one, or calibrate with fewer or shorter samples"
        )
    if target not in PLAN_TARGETS:
        return
    available = available_memory()
    if needed > available:
        raise QuasarError(
            f"compiling this model takes about {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; build on a "
            "larger machine, or for more ranks with --tp-size"
        )
    if target == "tensorrt":
        from quasar_trt.engines.cuda_device import CudaDevice

        device = CudaDevice()
        free = device.free_memory()
        if gpu_needed > free:
            raise QuasarError(
                f"running this model takes {gpu_needed / 1e9:.2f} GB on {device.name}, {free / 1e9:.2f} GB are free; build it with a "
                "smaller max_batch_size or max_seq_len, or for more ranks with --tp-size"
            )


def _own_gpu(sms: Sequence[int]) -> tuple[int]:
    from quasar_trt.engines.cuda_device import CudaDevice

    device = CudaDevice()
    if sms and set(sms) != {device.sm}:
        raise QuasarError(
            f"sm is {_text(sms)}; target 'tensorrt' compiles for the machine's own GPU, {device.name}, SM {device.sm}: leave it "
            "out, or build there"
        )
    return (device.sm,)


def _text(sms: Sequence[int]) -> str:
    return ", ".join(map(str, sms))
