"""Tiny models packed for the native engine, and steps of an engine."""

from __future__ import annotations

from engine_steps import prefill, rows_of  # noqa: F401 (for tests that take both from here)
from tiny import tiny_checkpoint

from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.recipe import Recipe

# Every linear of a layer is BF16 in one of the three layers and INT8 in another.
MIXED = ("*.0.mlp.fc", "*.0.mlp.gate", "*.1.attention.*", "*.2.mlp.proj")
RECIPES = {
    "bf16": Recipe("none"),
    "int8": Recipe("int8"),
    "int8 with int8 head": Recipe("int8", rotate=False, lm_head="int8"),
    "int8 with rescored head": Recipe("int8", lm_head="rescored"),
    "mixed": Recipe("int8", exclude=MIXED),
    "16-bit activations": Recipe("int8", activations=16),
    "mixed, 16-bit activations": Recipe("int8", activations=16, exclude=MIXED, lm_head="int8"),
}
SIZES = {  # with the columns of the Hadamard blocks before attention.dense and mlp.proj
    "plain": {},  # 16 and 16
    "odd head": {  # 8 and none
        "head_dim": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 72,
        "intermediate_size": 99,
    },
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "head norms": {"architecture": "Qwen3ForCausalLM"},
    "odd head norms": {"architecture": "Qwen3ForCausalLM", "head_dim": 20, "attention_bias": True},  # 4 and 16
    "wide blocks": {"head_dim": 64, "num_attention_heads": 2, "intermediate_size": 512},  # 64 and 512
    "narrow blocks": {"head_dim": 6, "intermediate_size": 92},  # 2 and 4
}


def packer(tmp_path_factory):
    """(recipe name, sizes name) -> (config, recipe, tensors, path of the packed weights), each made once."""
    made = {}

    def make(recipe: str, sizes: str = "plain"):
        if (recipe, sizes) not in made:
            config, chosen, tensors = tiny_checkpoint(3, RECIPES[recipe], **SIZES[sizes])
            path = tmp_path_factory.mktemp("packed") / "rank0.engine"
            compile_cpu(config, chosen, tensors, path)
            made[recipe, sizes] = config, chosen, tensors, path
        return made[recipe, sizes]

    return make
