"""Opens TensorRT-LLM's executor for an engine directory; of several ranks one leads and the others serve it.

Every rank of `mpirun -n TP` runs the same program: the executor of rank 0 takes requests, those of the others run what it is
given until it shuts down. Read in TensorRT-LLM's source, executed nowhere yet.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType

import torch

from quasar_trt.checkpoint import Checkpoint, weight_bytes
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.tensorrt_llm_stack import LLM_DIRECTORY, LLM_TARGET, llm_release


def open_executor(engine_dir: Path) -> dict[str, object]:
    """The arguments of `TensorRTLLMEngine`, on the rank that leads. On another rank this serves it, then ends the process.

    Raises QuasarError, in this order, for a directory of another target, without engines, or with those that cannot verify drafts,
    TensorRT-LLM missing or of another release, another number of ranks than tp_size, no GPU, one that the engines are not for or
    too few of them, and with what TensorRT-LLM says when it cannot load them.
    """
    manifest = Manifest.open(engine_dir)
    if manifest.target != LLM_TARGET:
        raise QuasarError(
            f"{engine_dir} was built for target '{manifest.target}'; engine 'tensorrt_llm' runs target {LLM_TARGET}"
        )
    path = engine_dir / LLM_DIRECTORY / "config.json"
    if not path.is_file():
        raise QuasarError(
            f"{engine_dir} ends with its checkpoint; where {LLM_TARGET} is installed, build it again or finish it with the command "
            "that its build printed"
        )
    version, gpus_per_node = _check_engines(path, manifest)
    release = llm_release()
    if release != version:
        raise QuasarError(
            f"{engine_dir} was compiled by {LLM_TARGET} {version}, {release} is installed and cannot run it: pip install "
            f"'{LLM_TARGET}=={version}', or build the engine again"
        )
    bindings = _bindings()
    rank, num_ranks = _rank()
    if num_ranks != manifest.tp_size:
        if rank:
            sys.exit()  # rank 0 says it
        raise QuasarError(
            f"{engine_dir} has tp_size {manifest.tp_size}, and this program runs on {num_ranks} rank{'s' * (num_ranks > 1)}; "
            f"start it as: {_launch(manifest.tp_size)}"
        )
    device = CudaDevice()
    if manifest.plan and device.sm not in manifest.plan.sms:
        raise QuasarError(
            f"{engine_dir} has engines for SM {', '.join(map(str, manifest.plan.sms))}; this GPU, {device.name}, is SM "
            f"{device.sm}: build the engine again on this machine"
        )
    here, needed = torch.cuda.device_count(), min(gpus_per_node, manifest.tp_size)
    if here < needed:
        raise QuasarError(f"{engine_dir} was built for {needed} GPUs per machine (gpus_per_node); this one has {here}")
    checkpoint = Checkpoint.open(engine_dir / "checkpoint")
    executor = _executor(bindings, engine_dir / LLM_DIRECTORY, manifest.limits.max_batch_size)
    if rank:
        executor.shutdown()  # returns once the leader has shut down
        sys.exit()
    vocab = checkpoint.config.vocab_size
    return {
        "bindings": bindings,
        "executor": executor,
        "config": checkpoint.config,
        "limits": manifest.limits,
        "padded_vocab_size": -(-vocab // manifest.tp_size) * manifest.tp_size,
        "weight_bytes_per_step": weight_bytes(checkpoint.config, checkpoint.recipe),
    }


def _bindings() -> ModuleType:
    """The module `tensorrt_llm.bindings.executor`. What its import prints goes to stderr."""
    os.environ.setdefault("TLLM_LOG_LEVEL", "ERROR")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module("tensorrt_llm.bindings.executor")
    except ImportError as error:
        raise QuasarError(f"the package {LLM_TARGET} is needed: it cannot be imported: {error}") from None


def _rank() -> tuple[int, int]:
    """(rank, ranks) of this program, of the MPI that TensorRT-LLM brings."""
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    return world.Get_rank(), world.Get_size()


def _launch(num_ranks: int) -> str:
    """The command line of this program, on so many ranks."""
    first, *rest = sys.argv
    program = ["python", first] if first.endswith(".py") else [Path(first).name]
    return shlex.join([*(["mpirun", "-n", str(num_ranks)] if num_ranks > 1 else []), *program, *rest])


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


def _executor(bindings: ModuleType, directory: Path, max_batch_size: int):
    """Reuse of blocks is what makes a resubmission cheap, and drafts are refused without it. Chunked context stays off: it drops
    draft tokens that do not fit into a block."""
    config = bindings.ExecutorConfig(
        max_batch_size=max_batch_size,
        kv_cache_config=bindings.KvCacheConfig(enable_block_reuse=True),
        gather_generation_logits=True,
    )
    try:
        return bindings.Executor(directory, bindings.ModelType.DECODER_ONLY, config)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise QuasarError(f"{directory} cannot be loaded: {reason}; build the engine again") from None
