"""The checkpoint inside an engine directory: TensorRT-LLM's layout, declared once, validated on write and on read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from quasar_trt.architectures import Linear, architecture_of, hadamard_blocks
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import SMOOTHQUANT, Recipe
from quasar_trt.rope import rope_type
from quasar_trt.tensor_parallel import rank_config
from quasar_trt.tensorfile import TensorSpec, read_header

LAYER_PREFIX = "transformer.layers.{i}."
EMBEDDING = "transformer.vocab_embedding.weight"
FINAL_NORM = "transformer.ln_f.weight"
HEAD = "lm_head.weight"
# What stock TensorRT-LLM modules cannot run carries this architecture, because stock loaders only warn about what they do not know.
OWN_ARCHITECTURE = "QuasarForCausalLM"


def below_layer(name: str) -> str:
    """A checkpoint name without `LAYER_PREFIX`, as `Linear.name` has it; a name outside of the layers as it is."""
    return name.split(".", 3)[-1]


def _layer_linears(config: ModelConfig) -> list[tuple[str, Linear]]:
    """(checkpoint name without ".weight", linear) of every layer, in order."""
    prefixes = [LAYER_PREFIX.format(i=i) for i in range(config.num_hidden_layers)]
    return [(prefix + linear.name, linear) for prefix in prefixes for linear in architecture_of(config).linears]


def check_exclusions(config: ModelConfig, recipe: Recipe) -> None:
    """Raises QuasarError for an exclude pattern and a weight-only name that match no linear of a layer, and where these cover some
    of the linears that share a norm, which carries the smoother of all of them or of none, and whose output all read alike."""
    linears = _layer_linears(config)
    for pattern in recipe.exclude:
        if not any(fnmatchcase(name, pattern) for name, _ in linears):
            raise QuasarError(
                f"exclude pattern '{pattern}' matches no linear; allowed: patterns of names from {linears[0][0]} to "
                f"{linears[-1][0]} (the head follows lm_head)"
            )
    strangers = set(recipe.weight_only) - {name for name, _ in linears}
    if strangers:
        raise QuasarError(
            f"weight_only '{min(strangers)}' is no linear; allowed: names from {linears[0][0]} to {linears[-1][0]}"
        )
    first: dict[str, str] = {}  # prefix and norm -> the first linear behind it
    for name, linear in linears:
        group = name.removesuffix(linear.name) + linear.norm if linear.norm else name
        other = first.setdefault(group, name)
        if recipe.quantizes(name) != recipe.quantizes(other):
            raise QuasarError(
                f"exclude covers one of {other} and {name}, which share a smoother; exclude both or neither"
            )
        if recipe.is_static(name) != recipe.is_static(other):
            raise QuasarError(
                f"weight_only has one of {other} and {name}, which read the same; it takes both or neither"
            )


def checkpoint_spec(config: ModelConfig, recipe: Recipe) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint file, in writing order: of the whole model, or of each rank for `rank_config`.

    Raises QuasarError as `check_exclusions` does.
    """
    check_exclusions(config, recipe)
    architecture = architecture_of(config)
    spec = {EMBEDDING: TensorSpec("BF16", (config.vocab_size, config.hidden_size))}
    for i in range(config.num_hidden_layers):
        prefix = LAYER_PREFIX.format(i=i)
        for norm in architecture.norms:
            spec[f"{prefix}{norm}.weight"] = TensorSpec("BF16", (config.hidden_size,))
            if any(recipe.quantizes(prefix + linear.name) for linear in architecture.linears if linear.norm == norm):
                spec[f"{prefix}{norm}.scale_to_int"] = TensorSpec("F32", (1,))
        for norm in architecture.head_norms:
            spec[f"{prefix}{norm}.weight"] = TensorSpec("BF16", (config.head_size,))
        for linear in architecture.linears:
            name, rows, columns = prefix + linear.name, linear.out_features(config), linear.in_features(config)
            quantized = recipe.quantizes(name)
            spec[f"{name}.weight"] = TensorSpec("I8" if quantized else "BF16", (rows, columns))
            if quantized:
                spec[f"{name}.per_channel_scale"] = TensorSpec("F32", (1, rows))
                if recipe.static_activations:
                    spec[f"{name}.act_scale"] = TensorSpec("F32", (1,))
                if linear.norm is None:
                    spec[f"{name}.smoother"] = TensorSpec("F32", (1, columns))
            if linear.bias(config):
                spec[f"{name}.bias"] = TensorSpec("BF16", (rows,))
    spec[FINAL_NORM] = TensorSpec("BF16", (config.hidden_size,))
    shape = (config.logits_size, config.hidden_size)
    spec[HEAD] = TensorSpec("I8" if recipe.lm_head == "int8" else "BF16", shape)
    if recipe.lm_head == "int8":
        spec["lm_head.per_channel_scale"] = TensorSpec("F32", (1, config.logits_size))
    return spec


def weight_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Bytes of weights that a pass reads, of all ranks."""
    return sum(
        spec.nbytes
        for name, spec in checkpoint_spec(config, recipe).items()
        if name.endswith(".weight") and len(spec.shape) == 2 and name != EMBEDDING
    )


def stock_obstacles(config: ModelConfig, recipe: Recipe) -> list[str]:
    """What TensorRT-LLM's own modules would leave out or compute otherwise, which their loader does not notice; none for a
    checkpoint that they run as it is."""
    architecture = architecture_of(config)
    facts = {
        f"norms over heads ({config.architecture})": bool(architecture.head_norms),
        "a bias on the attention output that the others do not have, or none where they have one": (
            config.dense_bias != (config.qkv_bias and architecture.stock_dense_bias)
        ),
        "YaRN": rope_type(config.rotary_scaling) == "yarn",
        f"{config.attention_size} rows of q with hidden_size {config.hidden_size}": (
            recipe.quantized and config.attention_size != config.hidden_size
        ),
        "a rotated model": bool(recipe.rotate),
        "excluded linears": bool(recipe.exclude),
        "activations of 16 bits": recipe.activations == 16,
        "static activation scales": bool(recipe.static_activations),
        "an INT8 head": recipe.lm_head == "int8",
    }
    return [fact for fact, found in facts.items() if found]


def checkpoint_config(config: ModelConfig, recipe: Recipe, tp_size: int = 1) -> dict:
    """config.json of the checkpoint: TensorRT-LLM's PretrainedConfig, our extras under the one key `quasar`.

    All sizes are the whole model's; only the Hadamard blocks are those of a rank, whose columns they divide.
    Raises QuasarError for a tp_size that does not divide the model.
    """
    architecture = architecture_of(config)
    stock = not stock_obstacles(config, recipe)
    scales = "PER_TENSOR" if recipe.static_activations else "PER_TOKEN"
    return {
        "architecture": architecture.stock if stock else OWN_ARCHITECTURE,
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_size": config.head_size,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "norm_epsilon": config.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_base": config.rotary_base,
        "rotary_scaling": config.rotary_scaling,
        "attn_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "qk_layernorm": bool(architecture.head_norms),
        "use_parallel_embedding": False,
        **(architecture.stock_keys if stock else {}),
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
        "quantization": {
            "quant_algo": f"W8A8_SQ_PER_CHANNEL_{scales}_PLUGIN" if recipe.quantized else None,
            "kv_cache_quant_algo": None,
            # a number even where each group has its own exponent; the scales themselves are in the tensors
            "smoothquant_val": SMOOTHQUANT if recipe.smoothquant is None else recipe.smoothquant,
            "exclude_modules": _excluded(config, recipe) if recipe.quantized else None,
        },
        "quasar": {
            "model": config.to_dict(),
            "recipe": recipe.to_dict(),
            "hadamard_blocks": hadamard_blocks(rank_config(config, tp_size), recipe),
        },
    }


def _excluded(config: ModelConfig, recipe: Recipe) -> list[str]:
    """Names of the linears that stay in BF16."""
    names = [name for name, _ in _layer_linears(config) if not recipe.quantizes(name)]
    return names + ([] if recipe.lm_head == "int8" else ["lm_head"])


def check_hadamard_blocks(found: object, config: ModelConfig, recipe: Recipe, where: str) -> None:
    """Raises QuasarError when a file was written for other blocks than `hadamard_blocks` says."""
    expected = hadamard_blocks(config, recipe)
    if found != expected:
        raise QuasarError(
            f"{where} has hadamard_blocks {found}, this version computes {expected}; build the engine again"
        )


def check_tensors(found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], where: str) -> None:
    """Raises one QuasarError that lists every missing, unexpected or mis-shaped tensor."""
    problems = [f"missing {name} {spec}" for name, spec in expected.items() if name not in found]
    problems += [f"unexpected {name} {spec}" for name, spec in found.items() if name not in expected]
    problems += [
        f"{name} is {found[name]}, must be {spec}"
        for name, spec in expected.items()
        if name in found and found[name] != spec
    ]
    if problems:
        raise QuasarError(f"{where} does not match its config.json: {'; '.join(problems)}")


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint directory; `config` is the whole model's."""

    directory: Path
    config: ModelConfig
    recipe: Recipe
    tp_size: int

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Reads config.json and every rank's tensor table (not the data). Raises QuasarError on any mismatch."""
        described = directory / "config.json"
        try:
            values = json.loads(described.read_text(encoding="utf-8"))
            extras, tp_size = values["quasar"], values["mapping"]["tp_size"]
            config, recipe = ModelConfig.from_dict(extras["model"]), Recipe.from_dict(extras["recipe"])
            rank = rank_config(config, tp_size)
            spec = checkpoint_spec(rank, recipe)
            blocks = extras["hadamard_blocks"]
        except OSError as error:
            raise QuasarError(f"cannot read {described}: {error.strerror}") from None
        except QuasarError as error:
            raise QuasarError(f"{described}: {error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise QuasarError(f"{described} is not a checkpoint of this product ({error})") from None
        check_hadamard_blocks(blocks, rank, recipe, str(described))
        checkpoint = cls(directory, config, recipe, tp_size)
        for path in checkpoint.paths:
            found, _, _, _ = read_header(path)
            check_tensors(found, spec, str(path))
        return checkpoint

    @property
    def paths(self) -> list[Path]:
        """The safetensors file of each rank."""
        return [self.directory / f"rank{rank}.safetensors" for rank in range(self.tp_size)]
