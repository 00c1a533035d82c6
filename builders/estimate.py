"""What a build will take, before it takes it."""

from __future__ import annotations

from dataclasses import dataclass

from quasar_trt.architectures import architecture_of
from quasar_trt.builders.calibrate import writes_itself
from quasar_trt.checkpoint import EMBEDDING, HEAD, LAYER_PREFIX, checkpoint_spec
from quasar_trt.engines.cpu_layout import packed_spec
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.manifest import Limits
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config
from quasar_trt.tensorfile import total_bytes

_PROGRAM = 600_000_000  # Python with its packages
_COMPILER_COPIES = 3  # of the weights, that TensorRT makes while it compiles


@dataclass(frozen=True)
class Estimate:
    """Bytes: of the checkpoint and the engine files, of the scratch file while texts are written, of memory at the peak
    (without pages of mapped files); of GPU memory that each rank's plan, with its caches, takes when it runs, 0 for the CPU."""

    checkpoint: int
    engine: int
    scratch: int
    memory: int
    gpu_memory: int = 0

    def __str__(self) -> str:
        size = self.checkpoint + self.engine
        scratch = f", {self.scratch / 1e9:.2f} GB more while it writes text" if self.scratch else ""
        gpu = f", to run {self.gpu_memory / 1e9:.2f} GB of GPU memory for each rank" if self.gpu_memory else ""
        return (
            f"needs about {self.memory / 1e9:.1f} GB of memory and {size / 1e9:.2f} GB of disk (checkpoint "
            f"{self.checkpoint / 1e9:.2f} GB, engine {self.engine / 1e9:.2f} GB){scratch}{gpu}"
        )


def estimate(
    config: ModelConfig, recipe: Recipe, tp_size: int, tokens: int, limits: Limits, plans: int | None = None
) -> Estimate:
    """For calibration on at most `tokens` tokens; plans: how many TensorRT plans are compiled for each rank, None for the CPU.

    Memory is that of the widest linear being quantized, or of the vocabulary being rotated, whichever is more: the layer
    and the linear's copies in float32, the second moment of its inputs and its factor, the activations of all tokens.
    """
    of_rank = rank_config(config, tp_size)
    unquantized = checkpoint_spec(config, Recipe("none"))
    layers = total_bytes(spec for name, spec in unquantized.items() if name.startswith(LAYER_PREFIX.format(i=0)))
    vocabulary = unquantized[EMBEDDING].nbytes + unquantized[HEAD].nbytes * (3 if recipe.lm_head == "int8" else 1)
    layer = 2 * layers
    if recipe.quantized:
        linears = architecture_of(config).linears
        columns = max(linear.in_features(config) for linear in linears)
        weight = max(4 * linear.in_features(config) * linear.out_features(config) for linear in linears)
        moments = 3 * 4 * columns**2 if recipe.rounding == "gptq" else 0
        layer += 3 * weight + moments + 6 * 4 * tokens * config.intermediate_size
    checkpoint = tp_size * total_bytes(checkpoint_spec(of_rank, recipe).values())
    packed = tp_size * total_bytes(packed_spec(of_rank, recipe).values())
    plan = checkpoint // tp_size
    if recipe.lm_head == "rescored":  # whose codes are not in the checkpoint
        plan += of_rank.logits_size * (config.hidden_size + 4)
    return Estimate(
        checkpoint=checkpoint,
        engine=packed if plans is None else plans * tp_size * plan,
        scratch=total_bytes(packed_spec(config, Recipe("none")).values())
        if writes_itself(config) and (recipe.quantized or tp_size == 1)
        else 0,
        memory=_PROGRAM + max(layer, vocabulary, _COMPILER_COPIES * plan if plans else 0),
        gpu_memory=plan + PlanSizes(limits, 1).cache_bytes(of_rank) if plans else 0,
    )
