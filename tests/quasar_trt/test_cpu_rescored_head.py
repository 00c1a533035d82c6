"""A rescored head of the native engine, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_engines import SIZES, rows_of
from tiny import random_ids, tiny_checkpoint

from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.plugins import native
from quasar_trt.recipe import LM_HEADS, RESCORED, Recipe


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("sizes", ["plain", "odd head", "narrow blocks"])
def test_a_rescored_head_has_the_best_logits_of_the_bf16_head_and_the_others_of_the_int8_head(sizes, isa, tmp_path):
    ids, rows = random_ids(tiny_checkpoint(3)[0], 40), {}
    for head in LM_HEADS:
        config, recipe, tensors = tiny_checkpoint(3, Recipe("int8", lm_head=head), **SIZES[sizes])
        for name in ("lm_head.weight", "lm_head.per_channel_scale"):
            if name in tensors:  # equal rows, among which the last of the best are
                same = tensors[name].flatten(0, -2) if name.endswith("weight") else tensors[name].view(-1, 1)
                tensors[name] = torch.cat([same[:50], same[50:51].expand(81, -1)]).view(tensors[name].shape)
        compile_cpu(config, recipe, tensors, tmp_path / head)
        engine = CpuEngine(tmp_path / head, max_seq_len=64, isa=isa)
        rows[head] = rows_of(engine, [SequenceStep(engine.open(), ids[:1], Draft(tuple(ids[1:])))])[0]
    best = np.argsort(-rows["int8"], axis=1, kind="stable")[:, :RESCORED]  # of equal logits the lower ids
    assert any({50} < set(ids) & set(range(50, 131)) < set(range(50, 131)) for ids in best.tolist())
    expected = rows["int8"].copy()
    np.put_along_axis(expected, best, np.take_along_axis(rows["bf16"], best, axis=1), axis=1)
    assert (rows["int8"] != rows["bf16"]).mean() > 0.9
    np.testing.assert_array_equal(rows["rescored"], expected)
