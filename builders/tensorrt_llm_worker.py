"""Builds one rank's TensorRT-LLM engine, in this process or in a worker."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from quasar_trt.errors import QuasarError
from quasar_trt.tensorrt_llm_stack import LLM_TARGET

MODEL_MODULE = "quasar_trt.builders.tensorrt_llm_model"
MODEL_CLASS = "QuasarForCausalLM"


@dataclass(frozen=True)
class RankBuild:
    """What one engine is built from.

    checkpoint, output: directories. gpu: index of the GPU that times kernels. own_model: our model class instead of the one that
    TensorRT-LLM has for the checkpoint's architecture. options: fields of BuildConfig.
    """

    checkpoint: str
    output: str
    rank: int
    gpu: int
    own_model: bool
    options: dict[str, int]


def build_rank(build: RankBuild) -> None:
    """Writes `rank{r}.engine`, and rank 0 TensorRT-LLM's config.json too. Raises QuasarError when TensorRT-LLM cannot."""
    try:
        _build_rank(build)
    except Exception as error:  # whatever its Python and its C++ raise
        said = str(error).strip() or type(error).__name__
        raise QuasarError(f"{LLM_TARGET} cannot build rank {build.rank}: {said.splitlines()[-1]}") from None
    if not Path(build.output, f"rank{build.rank}.engine").is_file():
        raise QuasarError(f"{LLM_TARGET} wrote no engine for rank {build.rank}; its log above says why")


def _build_rank(build: RankBuild) -> None:
    import torch
    from tensorrt_llm.builder import BuildConfig
    from tensorrt_llm.builder import build as build_engine
    from tensorrt_llm.models import MODEL_MAP
    from tensorrt_llm.models.modeling_utils import PretrainedConfig, SpeculativeDecodingMode

    torch.cuda.set_device(build.gpu)
    # Importing our model also tells TensorRT-LLM of its architecture, without which it cannot read the checkpoint's config.json.
    own = getattr(importlib.import_module(MODEL_MODULE), MODEL_CLASS) if build.own_model else None
    config = PretrainedConfig.from_json_file(str(Path(build.checkpoint, "config.json")))
    config.set_rank(build.rank)
    model = (own or MODEL_MAP[config.architecture]).from_checkpoint(build.checkpoint, config=config)
    options = BuildConfig(
        **build.options,
        speculative_decoding_mode=SpeculativeDecodingMode.DRAFT_TOKENS_EXTERNAL,
        output_timing_cache=None,  # it would be left in the directory of whoever builds
    )
    options.plugin_config.use_paged_context_fmha = True  # reusing keys and values, and so drafts, needs it
    build_engine(model, options).save(build.output)
