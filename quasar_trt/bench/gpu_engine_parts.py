"""Parts of the check for machines with a GPU that run engines: each builds what it runs from one model."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from quasar_trt.bench.engine_comparison import EngineComparison, compare
from quasar_trt.bench.figures import number
from quasar_trt.bench.gpu_part import NotRun, Outcome, need_gpu
from quasar_trt.bench.options import BenchOptions
from quasar_trt.bench.prompts import load_prompts
from quasar_trt.bench.run import run_bench
from quasar_trt.engines import cuda_device, open_engine
from quasar_trt.engines.base import Engine
from quasar_trt.engines.reference import ReferenceEngine
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.tables import Alarm, FigureTable
from quasar_trt.tensorrt_llm_stack import LLM_TARGET, llm_release
from quasar_trt.tensorrt_stack import load_stack
from quasar_trt.tokenizer import encode_chat, load_tokenizer

WEIGHTS = {"BF16": ("--quantization", "none"), "INT8": ("--calib-size", "4", "--calib-max-seq-length", "128")}
_LIMITS = ("--max-batch-size", "8", "--max-seq-len", "2048", "--max-draft-len", "8")
_TOKENS = 64  # of each answer that is compared


@dataclass
class EngineParts:
    """model: as `quasar-trt build` takes it. prompts: JSON Lines for a chat model. directory: for the engines that are built."""

    model: str
    prompts: Path
    directory: Path
    device: str = "cuda"  # of the reference engine
    _built: dict[tuple[str, str], Path] = field(default_factory=dict)

    def reference(self) -> Outcome:
        """The reference engine on the GPU, with its Triton operations, beside itself on the CPU."""
        need_gpu()
        found = {}
        for weights in WEIGHTS:
            directory = self._engine_dir("cpu", weights)
            on_device, on_cpu = (ReferenceEngine.from_dir(directory, device=device) for device in (self.device, "cpu"))
            found[weights] = self._compare(directory, on_device, on_cpu)
        return _outcome("the reference engine on the GPU", found)

    def target(self, target: str) -> Outcome:
        """Engines of a target that is named as its stack, beside the reference engine."""
        found = {
            weights: self._compare(
                directory, open_engine(directory), ReferenceEngine.from_dir(directory, device=self.device)
            )
            for weights, directory in self._engine_dirs(target).items()
        }
        return _outcome(target, found)

    def cells(self, target: str) -> Outcome:
        """The same engines as the four cells of the benchmark."""
        directories = self._engine_dirs(target)
        gc.collect()
        torch.cuda.empty_cache()  # cells are processes, and have what comparing leaves
        report = run_bench(directories, load_prompts(self.prompts), BenchOptions(), Console(quiet=True))
        return Outcome(report.to_dict(), report.tables())

    def _engine_dirs(self, target: str) -> dict[str, Path]:
        """Raises NotRun where the stack is missing."""
        need_gpu()
        try:
            llm_release() if target == LLM_TARGET else load_stack(target)
        except QuasarError as error:
            raise NotRun(str(error)) from None
        return {weights: self._engine_dir(target, weights) for weights in WEIGHTS}

    def _compare(self, directory: Path, engine: Engine, reference: Engine) -> EngineComparison:
        tokenizer = load_tokenizer(directory)
        prompts = [encode_chat(tokenizer, prompt.messages) for prompt in load_prompts(self.prompts)]
        limits = Manifest.open(directory).limits
        longest = limits.max_seq_len - _TOKENS
        return compare(engine, reference, [ids[-longest:] for ids in prompts], _TOKENS, limits.max_draft_len)

    def _engine_dir(self, target: str, weights: str) -> Path:
        """Raises RuntimeError, with what the build says, when it fails."""
        if (target, weights) not in self._built:
            directory = self.directory / f"{target}-{weights.lower()}"
            sm = ("--sm", str(cuda_device.CudaDevice().sm)) if target == "tensorrt-rtx" else ()
            options = ("--output-dir", str(directory), "--target", target, *sm, *_LIMITS, *WEIGHTS[weights])
            command = [sys.executable, "-m", "quasar_trt.cli", "build", *options, "--", self.model]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                said = run.stderr.strip().splitlines() or ["it says nothing"]
                raise RuntimeError(f"{target}, {weights} cannot be built: {said[-1]}")
            self._built[target, weights] = directory
        return self._built[target, weights]


def _outcome(title: str, found: dict[str, EngineComparison]) -> Outcome:
    rows = []
    for weights, one in found.items():
        equal = f"{one.num_equal}/{one.num_prompts}"
        figure = Alarm if one.failure else str
        same, difference = number(one.agreement, ".2%"), number(one.difference, ".3f")
        gap, kl, states = (
            figure(number(value, spec)) for value, spec in ((one.gap, ".3f"), (one.kl, ".5f"), (one.states, ".3f"))
        )
        rows.append((weights, equal, gap, kl, same, difference, states))
    headings = (
        "weights",
        "answers\nas reference",
        "gap where\nids part",
        "KL",
        "same\ntop id",
        "largest\ndifference",
        "states",
    )
    note = "Gaps and differences of logits; hidden states relative to their size."
    table = FigureTable(f"{title}, beside the reference engine", headings, rows, note)
    failure = "; ".join(f"{weights}: {one.failure}" for weights, one in found.items() if one.failure)
    return Outcome({weights: one.to_dict() for weights, one in found.items()}, [table], failure)
