"""The packed weight file of the CPU target, `rank{r}.engine`: which tensors it holds and how each is laid out.

Weights are packed as `quasar_trt.plugins.packing` says. Gate and up projection are one linear, `mlp.fc_gate`, whose blocks alternate (fc, gate, fc,
gate, ...): whoever computes a block of the gate has the matching block of the up projection at hand for silu(gate) * up.
"""

from __future__ import annotations

from quasar_trt.architectures import architecture_of
from quasar_trt.checkpoint import EMBEDDING, LAYER_PREFIX, check_exclusions
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins.packing import packed_shape, padded
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import TensorSpec

LAYOUT_VERSION = "1"
HEAD_ROWS = "lm_head.rows"  # as they are, beside the INT8 head


def packed_spec(config: ModelConfig, recipe: Recipe) -> dict[str, TensorSpec]:
    """Every tensor of a packed file, in writing order: of the whole model, or of each rank for `rank_config`.

    The rows of a rescored head and the embedding, whose sizes need not be aligned, come last. Raises QuasarError as `check_exclusions` does.
    """
    check_exclusions(config, recipe)
    spec: dict[str, TensorSpec] = {}

    def vector(name: str, size: int) -> None:
        spec[name] = TensorSpec("F32", (padded(size),))

    def linear(name: str, n: int, k: int, bias: bool, smoother: bool, quantized: bool) -> None:
        spec[f"{name}.weight"] = TensorSpec("I8" if quantized else "BF16", packed_shape(n, k, quantized))
        if quantized:
            vector(f"{name}.scale", n)
        if bias:
            vector(f"{name}.bias", n)
        if quantized and smoother:
            vector(f"{name}.inverse_smoother", k)

    for i in range(config.num_hidden_layers):
        prefix = LAYER_PREFIX.format(i=i)
        for norm in architecture_of(config).norms:
            vector(f"{prefix}{norm}.weight", config.hidden_size)
        for norm in architecture_of(config).head_norms:
            vector(f"{prefix}{norm}.weight", config.head_size)
        for part in architecture_of(config).linears:
            name, n = part.name, part.out_features(config)
            if name == "mlp.gate":
                continue  # half of mlp.fc_gate
            if name == "mlp.fc":
                name, n = "mlp.fc_gate", 2 * padded(n)
            quantized = recipe.quantizes(prefix + part.name)
            linear(prefix + name, n, part.in_features(config), part.bias(config), part.norm is None, quantized)
    vector("transformer.ln_f.weight", config.hidden_size)
    quantized = recipe.lm_head in ("int8", "rescored")
    linear("lm_head", config.logits_size, config.hidden_size, False, False, quantized)
    if recipe.lm_head == "rescored":
        spec[HEAD_ROWS] = TensorSpec("BF16", (config.logits_size, config.hidden_size))
    spec[EMBEDDING] = TensorSpec("BF16", (config.vocab_size, config.hidden_size))
    return spec
