"""The precision that is promised: the native engine with BF16 weights against transformers in float32.

The keys and values of the cache are BF16, all else is float32. What that rounding does to a logit depends on the weights:
these are as a model is initialized for training, not as chaotic as in other tests.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import LLAMA3, MODELS, checkpoint_tensors, random_ids, tiny_model

from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.recipe import Recipe

TOLERANCE = 2e-2  # of any logit, where they have a standard deviation of 1 to 1.5

VARIANTS = {
    "grouped": {},
    "every head its own": {"num_key_value_heads": 6},
    "one key for all": {"num_key_value_heads": 1},
    "tied head": {"tie_word_embeddings": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
}
# the families whose config.json decides about biases
BIASES = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "Qwen3ForCausalLM": {"attention_bias": True},
    "PanguEmbeddedForCausalLM": {"attention_bias": False},
}
CASES = [(name, variant, overrides) for name in MODELS for variant, overrides in VARIANTS.items()]
CASES += [(name, "biases switched", overrides) for name, overrides in BIASES.items()]


@torch.no_grad()
def gentle_model(architecture: str, ids: list[int], **overrides):
    """`tiny_model` with other sizes of its weights: the embedding has a standard deviation of 1, matrices 1 / sqrt(columns),
    those that write to the residual stream 1 / sqrt(columns x 2 x layers), the logits over `ids` 1.25."""
    model = tiny_model(architecture, 3, **overrides)
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.div_(0.5)
        elif "_proj" in name:
            writes = "o_proj" in name or "down_proj" in name
            weight.div_(1.5 * ((2 * model.config.num_hidden_layers) ** 0.5 if writes else 1))
    model.model.norm.weight *= 1.25 / model(torch.tensor([ids])).logits.std()
    for weight in model.parameters():
        weight.copy_(weight.bfloat16().float())
    return model


@pytest.mark.parametrize(("architecture", "variant", "overrides"), CASES, ids=[f"{name} {v}" for name, v, _ in CASES])
def test_prefill_decode_and_verify_are_within_two_hundredths(architecture, variant, overrides, tmp_path):
    ids = random_ids(checkpoint_tensors(tiny_model(architecture, 3, **overrides))[0], 70)
    model = gentle_model(architecture, ids, **overrides)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
        bare = model.lm_head(model.model.norm(model.model.embed_tokens(torch.tensor(ids)))).numpy()
    assert 1 <= expected.std() <= 1.5
    assert (expected - bare).std() > 0.4  # the layers matter
    config, tensors = checkpoint_tensors(model)
    compile_cpu(config, Recipe("none"), tensors, tmp_path / "rank0.engine")
    engine = CpuEngine(tmp_path / "rank0.engine", max_seq_len=80)

    def rows(sequence: int, tokens: list[int], drafts: list[int] = ()) -> np.ndarray:
        found = []

        def accept(index, logits):
            found.append(np.array(logits))
            return Acceptance((), len(drafts))

        engine.step([SequenceStep(sequence, tokens, Draft(tuple(drafts)))], accept)
        return found[0]

    errors = {"prefill": rows(engine.open(), ids[:1], ids[1:]) - expected}
    sequence = engine.open()
    rows(sequence, ids[:40])
    errors["verify"] = rows(sequence, ids[40:41], ids[41:45]) - expected[40:45]
    errors["decode"] = np.concatenate([rows(sequence, [token]) for token in ids[45:]]) - expected[45:]
    worst = {stage: float(np.abs(error).max()) for stage, error in errors.items()}
    assert max(worst.values()) <= TOLERANCE, worst
