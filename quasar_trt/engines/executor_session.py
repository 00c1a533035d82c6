"""An engine directory of target tensorrt-llm on its way to TensorRT-LLM's executor.

Every rank starts an executor. Rank 0's takes requests, those of the others run what it is given, in threads of their own, until
it shuts down. Read in TensorRT-LLM's source, executed nowhere yet.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from quasar_trt.checkpoint import Checkpoint, weight_bytes
from quasar_trt.communicator import Communicator
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.tensorrt_llm_stack import LLM_DIRECTORY, LLM_TARGET, llm_release

_LARGEST_SHARE = (
    0.9  # of the memory that is free once the engine is loaded, for keys and values: the executor's own default
)


class ExecutorSession:
    """Checks everything that can be checked before anything is loaded.

    bindings: the module `tensorrt_llm.bindings.executor`. padded_vocab_size: rows of the head on all ranks. The rest is as in
    `Engine`.

    Raises QuasarError, in this order, for a directory of another target, without engines, or with those that cannot verify drafts,
    for TensorRT-LLM missing or of another release, for a machine without the GPU of this rank, and a GPU that the engines are not
    for.
    """

    def __init__(self, engine_dir: Path, ranks: Communicator | None = None):
        manifest = Manifest.open(engine_dir)
        if manifest.target != LLM_TARGET:
            raise QuasarError(
                f"{engine_dir} was built for target '{manifest.target}'; engine 'tensorrt_llm' runs target {LLM_TARGET}"
            )
        self._directory = engine_dir / LLM_DIRECTORY
        description = self._directory / "config.json"
        if not description.is_file():
            raise QuasarError(
                f"{engine_dir} ends with its checkpoint; where {LLM_TARGET} is installed, build it again or finish it with the "
                "command that its build printed"
            )
        version, gpus_per_node = _check_engines(description, manifest)
        release = llm_release()
        if release != version:
            raise QuasarError(
                f"{engine_dir} was compiled by {LLM_TARGET} {version}, {release} is installed and cannot run it: pip install "
                f"'{LLM_TARGET}=={version}', or build the engine again"
            )
        self.bindings = _bindings()
        rank = ranks.rank if ranks else 0
        gpu, gpus = rank % gpus_per_node, torch.cuda.device_count()
        if 0 < gpus <= gpu:
            raise QuasarError(
                f"rank {rank} takes GPU {gpu} of its machine, which has {gpus}; {engine_dir} was built for {gpus_per_node} per "
                "machine (gpus_per_node): start fewer ranks on a machine, or build it on one like those that run it"
            )
        device = CudaDevice(gpu)
        if manifest.plan and device.sm not in manifest.plan.sms:
            raise QuasarError(
                f"{engine_dir} has engines for SM {', '.join(map(str, manifest.plan.sms))}; this GPU, {device.name}, is SM "
                f"{device.sm}: build the engine again on this machine"
            )
        checkpoint = Checkpoint.open(engine_dir / "checkpoint")
        self.config = checkpoint.config
        self.limits = manifest.limits
        self.padded_vocab_size = -(-self.config.vocab_size // manifest.tp_size) * manifest.tp_size
        self.weight_bytes_per_step = weight_bytes(self.config, checkpoint.recipe) // manifest.tp_size

    def start(self):
        """The executor; of several ranks all start theirs together. Raises QuasarError with what TensorRT-LLM says when it cannot
        load the engines.

        Reuse of blocks is what makes a resubmission cheap, and drafts are refused without it. Chunked context stays off: it drops
        draft tokens that do not fit into a block.
        """
        bindings = self.bindings
        cache = bindings.KvCacheConfig(
            enable_block_reuse=True,
            max_tokens=self.limits.max_batch_size * PlanSizes(self.limits, 1).capacity,
            # The smaller of the two counts. It alone would take all but a tenth, and no engine could open beside another.
            free_gpu_memory_fraction=_LARGEST_SHARE,
        )
        config = bindings.ExecutorConfig(
            max_batch_size=self.limits.max_batch_size, kv_cache_config=cache, gather_generation_logits=True
        )
        try:
            return bindings.Executor(self._directory, bindings.ModelType.DECODER_ONLY, config)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise QuasarError(f"{self._directory} cannot be loaded: {reason}; build the engine again") from None


def _bindings() -> ModuleType:
    """What the import prints goes to stderr."""
    os.environ.setdefault("TLLM_LOG_LEVEL", "ERROR")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module("tensorrt_llm.bindings.executor")
    except ImportError as error:
        raise QuasarError(f"the package {LLM_TARGET} is needed: it cannot be imported: {error}") from None


def _check_engines(path: Path, manifest: Manifest) -> tuple[str, int]:
    """(release, gpus_per_node) of the engines that TensorRT-LLM describes in `path`. Raises QuasarError where they cannot verify
    drafts as the manifest says."""
    try:
        values = json.loads(path.read_text())
        pretrained, build = values["pretrained_config"], values["build_config"]
        mapping, limits = pretrained["mapping"], manifest.limits
        facts = {
            "tp_size": (mapping["tp_size"], manifest.tp_size),
            "pp_size": (mapping.get("pp_size", 1), 1),
            "max_batch_size": (build["max_batch_size"], limits.max_batch_size),
            "max_seq_len": (min(build["max_seq_len"], limits.max_seq_len), limits.max_seq_len),
            "max_draft_len": (build["max_draft_len"], limits.max_draft_len),
            "use_paged_context_fmha": (build["plugin_config"]["use_paged_context_fmha"], True),
            "logits_dtype": (pretrained["logits_dtype"], "float32"),
        }
        release = values["version"], mapping.get("gpus_per_node", 8)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise QuasarError(f"{path} is no description of TensorRT-LLM's ({error!r}); build the engine again") from None
    for name, (found, needed) in facts.items():
        if found != needed:
            raise QuasarError(
                f"{path} has {name} {found}; this engine directory needs {needed}: build the engine again"
            )
    return release
