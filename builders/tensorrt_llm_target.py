"""Compiles a checkpoint into TensorRT-LLM engines: with its own modules (way `stock`), or with our model class (way `quasar`).

Where TensorRT-LLM cannot build, the engine directory ends with the checkpoint, and a command that finishes it elsewhere is told.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import shlex
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quasar_trt.builders.plugin_gpus import check_plugin_gpu
from quasar_trt.builders.progress import Advance, Stages
from quasar_trt.builders.tensorrt_llm_worker import MODEL_CLASS, MODEL_MODULE, RankBuild, build_rank
from quasar_trt.checkpoint import stock_obstacles
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Limits
from quasar_trt.model_config import ModelConfig
from quasar_trt.plan import Plan, plan_header
from quasar_trt.recipe import Recipe
from quasar_trt.rope import rope_type
from quasar_trt.tensorfile import FileRecord, hash_file
from quasar_trt.tensorrt_llm_stack import LLM_DIRECTORY, LLM_TARGET, llm_release
from quasar_trt.tensorrt_stack import load_stack

_NUM_TOKENS = 8192  # of a pass: TensorRT-LLM's own default
_WITHOUT_SMOOTHQUANT = range(100, 120)  # GPUs for which TensorRT-LLM refuses INT8


@dataclass(frozen=True)
class LlmHost:
    """The machine as a builder for TensorRT-LLM. sm: of its GPU, by compute capability times ten; gpus: how many build at a time."""

    release: str
    sm: int
    gpus: int


def check_llm_target(recipe: Recipe, sms: Sequence[int]) -> LlmHost | QuasarError:
    """The host, or why this machine is none. Raises QuasarError for what no machine compiles."""
    if sms:
        raise QuasarError(
            f"sm is {', '.join(map(str, sms))}; target '{LLM_TARGET}' compiles for the machine's own GPU: leave it out"
        )
    if recipe.lm_head == "rescored":
        raise QuasarError(f"lm_head is 'rescored'; target '{LLM_TARGET}' allows bf16, int8")
    if recipe.static_activations:
        raise QuasarError(f"target '{LLM_TARGET}' has scales for each token: leave static_activations out")
    import torch

    from quasar_trt.engines.cuda_device import CudaDevice

    try:
        release = llm_release()
        device = CudaDevice()
        if recipe.quantized:
            load_stack("triton")  # which compiles the kernels of the plugins
    except QuasarError as error:
        return error
    return LlmHost(release, device.sm, torch.cuda.device_count())


def check_llm_model(config: ModelConfig, recipe: Recipe, host: LlmHost | QuasarError) -> None:
    """Refuses what neither way computes, before any weight is read."""
    if rope_type(config.rotary_scaling) == "yarn":
        raise QuasarError(
            f"rope type is 'yarn', of which TensorRT-LLM has another one: target '{LLM_TARGET}' allows the other types; "
            "build with --target tensorrt"
        )
    if isinstance(host, LlmHost) and recipe.quantized and choose_way(config, recipe, host.sm)[0] == "quasar":
        check_plugin_gpu(host.sm, "one of these, or quantization 'none'")


def choose_way(config: ModelConfig, recipe: Recipe, sm: int | None) -> tuple[str, str]:
    """("stock" or "quasar", why): what stock modules would get wrong, most of it without a word, decides. sm: None for any."""
    obstacles = stock_obstacles(config, recipe)
    if recipe.quantized and sm in _WITHOUT_SMOOTHQUANT:
        obstacles.append(f"INT8 on SM {sm}")
    if obstacles:
        return "quasar", f"our model class, because TensorRT-LLM's own modules cannot have {', '.join(obstacles)}"
    return "stock", "TensorRT-LLM's own modules, which run this checkpoint as it is; our model class is not needed"


def compile_llm(
    config: ModelConfig,
    recipe: Recipe,
    tp_size: int,
    limits: Limits,
    host: LlmHost,
    directory: Path,
    stages: Stages,
) -> tuple[Plan, dict[str, FileRecord]]:
    """Builds the checkpoint in `directory` into `tensorrt_llm` beside it, each rank by a worker where there are several.

    Raises QuasarError with the last line of what TensorRT-LLM said when it fails.
    """
    way, why = choose_way(config, recipe, host.sm)
    stages.say(f"{LLM_TARGET} {host.release}, way '{way}': {why}")
    builds = [
        RankBuild(
            checkpoint=str(directory / "checkpoint"),
            output=str(directory / LLM_DIRECTORY),
            rank=rank,
            gpu=rank % host.gpus,
            own_model=way == "quasar",
            options=_build_options(limits),
        )
        for rank in range(tp_size)
    ]
    advance = stages.stage("Compiling", tp_size)
    _build(builds, min(host.gpus, tp_size), advance)
    names = [f"{LLM_DIRECTORY}/rank{rank}.engine" for rank in range(tp_size)]
    plan = Plan(LLM_TARGET, host.release, (host.sm,), way, _num_tokens(limits))
    return plan, {name: _record(directory / name) for name in names}


def _record(path: Path) -> FileRecord:
    header = hashlib.sha256(plan_header(path)).hexdigest()
    return FileRecord(path.stat().st_size, hash_file(path, lambda count: None), header)


def _build(builds: Sequence[RankBuild], workers: int, advance: Advance) -> None:
    if len(builds) == 1:
        build_rank(builds[0])
        advance(1)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for future in [pool.submit(build_rank, build) for build in builds]:
                future.result()
                advance(1)
        except BrokenExecutor:
            raise QuasarError(f"a worker of {LLM_TARGET} died; its log above says why") from None


def _num_tokens(limits: Limits) -> int:
    """Rows of a pass: the longest prompt whole, and the draft of every request."""
    return max(_NUM_TOKENS, limits.max_seq_len, limits.max_batch_size * (limits.max_draft_len + 1))


def _build_options(limits: Limits) -> dict[str, int]:
    """Fields of BuildConfig; its build adds max_draft_len to max_seq_len."""
    return {
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_seq_len,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": _num_tokens(limits),
        "max_draft_len": limits.max_draft_len,
    }


def finishing_lines(
    config: ModelConfig, recipe: Recipe, limits: Limits, engine_dir: Path, why: QuasarError
) -> tuple[str, str, str]:
    """Why `engine_dir` has no engines, the way that is left, and the command that takes it on a host with TensorRT-LLM (way quasar
    needs quasar-trt there too)."""
    engine_dir = engine_dir.absolute()
    parts = {
        "checkpoint_dir": shlex.quote(str(engine_dir / "checkpoint")),
        "output_dir": shlex.quote(str(engine_dir / LLM_DIRECTORY)),
        **_build_options(limits),
        "speculative_decoding_mode": "draft_tokens_external",
        "use_paged_context_fmha": "enable",
    }
    way, reason = choose_way(config, recipe, None)
    if way == "quasar":
        origin = f'from importlib.util import find_spec; print(find_spec("{MODEL_MODULE}").origin)'
        parts |= {"model_cls_file": f"\"$(python -c '{origin}')\"", "model_cls_name": MODEL_CLASS}
    return (
        f"note: {engine_dir} ends with its checkpoint, no engine was built: {why}",
        f"trtllm-build finishes it on a host with TensorRT-LLM, way '{way}': {reason}:",
        " ".join(["trtllm-build", *(f"--{name} {value}" for name, value in parts.items())]),
    )
