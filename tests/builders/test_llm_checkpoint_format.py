"""The checkpoints that we write, held to an independent description of TensorRT-LLM's format."""

from __future__ import annotations

import fnmatch
import json
import tempfile
from pathlib import Path

import llm_checkpoint_format as described
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from quasar_trt.builders.sharded_writer import ShardedWriter
from quasar_trt.checkpoint import checkpoint_config, checkpoint_spec
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "pangu": "PanguEmbeddedForCausalLM",
}
TORCH = {"BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.int8}


@st.composite
def models(draw):
    """(described model, ranks that divide it)"""
    T = draw(st.sampled_from([1, 2, 3, 4]))
    family = draw(st.sampled_from([*CLASSES]))
    kv_heads = T * draw(st.integers(1, 2))
    heads, size = kv_heads * draw(st.integers(1, 3)), 2 * draw(st.integers(1, 5))
    hidden = heads * size if draw(st.booleans()) else draw(st.integers(4, 40))
    model = described.Model(
        family=family,
        H=hidden,
        Nq=heads,
        Nkv=kv_heads,
        D=size,
        I=T * draw(st.integers(1, 12)),
        V=draw(st.integers(T, 50)),
        layers=draw(st.integers(1, 3)),
        bias=family in ("llama", "qwen3", "pangu") and draw(st.booleans()),
        mlp_bias=family == "llama" and draw(st.booleans()),
    )
    return model, T


@st.composite
def recipes(draw):
    if draw(st.booleans()):
        return Recipe("none")
    exclude = draw(
        st.lists(
            st.sampled_from(["transformer.layers.0.*", "*.attention.dense", "*.mlp.proj", "*.mlp.[fg]*"]), max_size=2
        )
    )
    return Recipe(
        smoothquant=draw(st.none() | st.floats(0, 1)),
        rotate=draw(st.booleans()),
        activations=draw(st.sampled_from([8, 16])),
        exclude=tuple(exclude),
        lm_head=draw(st.sampled_from(["bf16", "int8", "rescored"])),
    )


def our_config(model: described.Model) -> ModelConfig:
    return ModelConfig(
        architecture=CLASSES[model.family],
        hidden_size=model.H,
        intermediate_size=model.I,
        num_hidden_layers=model.layers,
        num_attention_heads=model.Nq,
        num_key_value_heads=model.Nkv,
        head_size=model.D,
        vocab_size=model.V,
        max_position_embeddings=128,
        norm_epsilon=1e-5,
        rotary_base=10000.0,
        qkv_bias=model.qkv_bias,
        dense_bias=model.dense_bias,
        mlp_bias=model.mlp_bias,
    )


def tables(model, T, recipe):
    """The described tensors of a rank, and those of one rank alone."""
    linears = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
    names = [f"transformer.layers.{i}.{name}" for i in range(model.layers) for name in linears]
    excluded = frozenset(name for name in names if any(fnmatch.fnmatchcase(name, p) for p in recipe.exclude))
    options = (recipe.quantization == "int8", excluded, recipe.lm_head == "int8")
    return described.tensors(model, T, *options), described.tensors(model, 1, *options)


@given(models(), recipes(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_every_rank_holds_the_described_tensors_and_their_parts(model_and_ranks, recipe, seed):
    model, T = model_and_ranks
    config = our_config(model)
    of_rank, whole = tables(model, T, recipe)
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: torch.randint(-127, 128, stored.shape, generator=generator).to(TORCH[stored.dtype])
        for name, stored in whole.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        with ShardedWriter(Path(folder), config, recipe, T) as writer:
            for name in checkpoint_spec(config, recipe):
                writer.write(name, values[name])
        assert {path.name for path in Path(folder).iterdir()} == {f"rank{rank}.safetensors" for rank in range(T)}
        for rank in range(T):
            with safe_open(Path(folder, f"rank{rank}.safetensors"), "pt") as file:
                assert set(file.keys()) == of_rank.keys()
                for name, stored in of_rank.items():
                    kind, shape = file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape())
                    assert (kind, shape) == (stored.dtype, stored.shape), name
                    expected = described.part(values[name].float().numpy(), stored, model, T, rank)
                    np.testing.assert_array_equal(file.get_tensor(name).float().numpy(), expected, err_msg=name)


@given(models(), recipes())
@settings(max_examples=100, deadline=None)
def test_config_json_says_what_tensorrt_llm_reads(model_and_ranks, recipe):
    model, T = model_and_ranks
    quantized = recipe.quantization == "int8"
    values = json.loads(json.dumps(checkpoint_config(our_config(model), recipe, T)))
    expected = described.config(model, T, quantized)
    assert {name: values[name] for name in expected} == expected
    quantization = values["quantization"]
    assert quantization.keys() <= described.QUANTIZATION_KEYS
    assert quantization["quant_algo"] == ("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN" if quantized else None)
    assert quantization["kv_cache_quant_algo"] is None
    own = quantized and (recipe.rotate or recipe.activations == 16 or recipe.exclude or recipe.lm_head == "int8")
    stock = described.stock(model, quantized, bool(own))
    assert values["architecture"] == (stock or "QuasarForCausalLM")
    if stock == "Qwen2ForCausalLM":
        assert values["qwen_type"] == "qwen2"
