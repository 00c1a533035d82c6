"""Ranks of a tensor parallel checkpoint compute together what the whole model computes."""

from __future__ import annotations

import pytest
from ranks import RECIPES, SIZES, forward, shards
from tiny import MODELS, random_ids, tiny_checkpoint
from torch import Tensor

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("architecture", MODELS)
def test_ranks_of_bf16_weights_compute_what_the_whole_model_computes(architecture, tp_size):
    config, recipe, tensors = tiny_checkpoint(0, Recipe("none"), architecture, **SIZES)
    ids = random_ids(config, 40)
    expected = ReferenceModel(config, recipe, tensors)(ids)
    found = forward(rank_config(config, tp_size), recipe, shards(config, tensors, tp_size), {}, ids)
    assert expected.std() > 1
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tp_size", [2, 3])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
def test_ranks_of_int8_weights_differ_by_how_they_round_activations(recipe, tp_size):
    """A rank's scale of a row is of its own columns alone, so ranks round to other codes than one process: by 5 % of the logits
    with 8 bits, which is what any rounding changes in so small a model, by 256 times less with 16. Without rounding nothing differs."""
    config, chosen, tensors = tiny_checkpoint(0, RECIPES[recipe], **SIZES)
    ids, rank = random_ids(config, 40), rank_config(config, tp_size)
    blocks = hadamard_blocks(rank, chosen)
    parts = shards(config, tensors, tp_size)
    for rounded, tolerance in ((True, {8: 0.05, 16: 3e-4}[chosen.activations]), (False, 1e-5)):
        expected = forward(config, chosen, [tensors], blocks, ids, rounded)
        found = forward(rank, chosen, parts, blocks, ids, rounded)
        assert relative_error(found, expected) <= tolerance


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_emulation_with_one_rank_is_the_reference_model(recipe):
    """Up to codes of activations at a tie, which may round either way."""
    config, chosen, tensors = tiny_checkpoint(0, RECIPES[recipe], **SIZES)
    ids = random_ids(config, 40)
    found = forward(config, chosen, shards(config, tensors, 1), hadamard_blocks(config, chosen), ids)
    assert relative_error(found, ReferenceModel(config, chosen, tensors)(ids)) <= (0.01 if chosen.quantized else 1e-5)
