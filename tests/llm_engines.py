"""TensorRT-LLM engines on the double of its executor, over prescribed rows of logits or a tiny model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
from executor_double import VERSION, ExecutorBase, executor_module, write_llm_engine
from stubs import StubEngine
from tiny import write_engine_dir

from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.engines.tensorrt_llm import TensorRTLLMEngine
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.plan import Plan
from quasar_trt.recipe import Recipe
from quasar_trt.tensorrt_llm_stack import LLM_DIRECTORY, LLM_TARGET

LIMITS = Limits(max_batch_size=16, max_seq_len=256, max_draft_len=8)
Rows = Callable[[tuple[int, ...]], np.ndarray]


def stub_bindings(logits: Rows, vocab: int) -> ModuleType:
    """The bindings of an executor whose passes give these rows."""

    class StubExecutor(ExecutorBase):
        model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab), tensors={}, recipe=Recipe("none"))
        rank, world_size = 0, 1

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.engine = StubEngine(logits, vocab, max_seq_len=self.engine.max_seq_len, max_rows=10**6)

        def _finish(self, running):
            super()._finish(running)
            while len(self._kept) > 8:  # the memory for blocks is limited, and so is the time to look through them
                self.engine.close(self._kept.pop(0)[1])

    bindings = executor_module(StubExecutor.model)
    bindings.Executor = StubExecutor
    return bindings


def llm_engine(
    directory: Path, source: Rows | ReferenceModel, vocab: int, limits: Limits = LIMITS
) -> TensorRTLLMEngine:
    """An engine whose executor is `engine._executor`; source: rows of logits, or a model."""
    is_model = isinstance(source, ReferenceModel)
    bindings = executor_module(source) if is_model else stub_bindings(source, vocab)
    write_llm_engine(
        directory,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_draft_len=limits.max_draft_len,
        plugin_config={"use_paged_context_fmha": True, "tokens_per_block": 4},
    )
    config = bindings.ExecutorConfig(
        kv_cache_config=bindings.KvCacheConfig(enable_block_reuse=True), gather_generation_logits=True
    )
    executor = bindings.Executor(directory, bindings.ModelType.DECODER_ONLY, config)
    session = SimpleNamespace(
        bindings=bindings,
        start=lambda: executor,
        config=source.config if is_model else SimpleNamespace(vocab_size=vocab),
        limits=limits,
        padded_vocab_size=vocab,
        weight_bytes_per_step=0,
    )
    engine = TensorRTLLMEngine(session)
    engine.start()
    return engine


def write_llm_dir(directory: Path, model, max_seq_len: int = 64, tp_size: int = 1) -> Path:
    """An engine directory of target tensorrt-llm; model: what `tiny.tiny_checkpoint` gives."""
    return retarget(write_engine_dir(directory, *model, max_seq_len=max_seq_len), tp_size)


def retarget(directory: Path, tp_size: int = 1, sm: int = 90) -> Path:
    """An engine directory of one rank becomes one of target tensorrt-llm. Each of several ranks has all of it."""
    manifest = Manifest.open(directory)
    limits = manifest.limits
    write_llm_engine(
        directory / LLM_DIRECTORY,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_draft_len=limits.max_draft_len,
        tp_size=tp_size,
    )
    change_description(directory, "pretrained_config", logits_dtype="float32")
    shard = "checkpoint/rank0.safetensors"
    record = manifest.files[shard]
    files = {shard.replace("rank0", f"rank{rank}"): record for rank in range(tp_size)}
    for name in files.keys() - {shard}:
        shutil.copy(directory / shard, directory / name)
    plan = Plan(LLM_TARGET, VERSION, (sm,), "stock", 8192)
    dataclasses.replace(manifest, target=LLM_TARGET, plan=plan, files=files, tp_size=tp_size).write(directory)
    return directory


def change_description(directory: Path, part: str | None, **values) -> None:
    """Of the engine by TensorRT-LLM itself; part: of it, None for the whole."""
    path = directory / LLM_DIRECTORY / "config.json"
    description = json.loads(path.read_text())
    (description[part] if part else description).update(values)
    path.write_text(json.dumps(description))
