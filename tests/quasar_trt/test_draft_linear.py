"""Linears of drafting heads, in both quantizations, with and without native kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heads import eagle_tensors, eagle_values, write_eagle
from tiny import random_ids

from quasar_trt.drafters.draft_linear import DraftLinears
from quasar_trt.drafters.eagle_head import EagleHead
from quasar_trt.drafters.eagle_layer import LayerPart
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.errors import QuasarError
from quasar_trt.plugins import native, reference
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams


@pytest.fixture(params=[False, True], ids=["native", "numpy"])
def without_native(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(native, "UNAVAILABLE", "not built")


def linears(quantization: str) -> DraftLinears:
    return DraftLinears(None, quantization)


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("rows", [1, 5])
def test_int8_is_the_reference_operation_on_16_bit_activations(rows):
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(37, 50, generator=generator), torch.randn(37, generator=generator)
    x = torch.randn(rows, 50, generator=generator)
    expected = reference.w8a16_linear(*reference.quantize_16(x), *reference.quantize_8(weight), bias)
    found = linears("int8")(weight, bias)(x.numpy())
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-3)
    assert np.abs(found - (x @ weight.T + bias).numpy()).max() > 5e-3  # what INT8 weights cost


@pytest.mark.usefixtures("without_native")
def test_none_is_a_product_with_bf16_weights():
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(37, 50, generator=generator), torch.randn(3, 50, generator=generator)
    expected = x @ weight.bfloat16().float().T
    np.testing.assert_allclose(linears("none")(weight)(x.numpy()), expected.numpy(), atol=1e-4)


def held_by_int8(weight: torch.Tensor) -> torch.Tensor:
    """Near values that INT8 with a scale for each row holds, and BF16 too."""
    step = 2.0 ** (weight.abs().amax(1, keepdim=True) / 127).log2().ceil()
    codes = (weight / step).round()
    return (
        codes.scatter_(1, weight.abs().argmax(1, keepdim=True), 127.0) * step
    )  # a scale is the largest value over 127


@pytest.mark.parametrize("third", [False, True])
def test_weights_that_int8_holds_give_the_same_head(deep_dirs, tmp_path, third):
    engine = open_engine(deep_dirs["BF16"], "cpu", threads=1)
    values = eagle_values(engine.config, hidden_size=42, draft_vocab_size=90)
    tensors = eagle_tensors(engine.config, third, values)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = held_by_int8(tensor)
    if third:  # a weight of the norm before q, k and v is multiplied into theirs
        tensors["midlayer.input_layernorm.weight"] = torch.ones(42)
    directory = write_eagle(tmp_path / "head", values, tensors)
    states = np.random.default_rng(0).standard_normal((6, 3 if third else 1, 42), np.float32)
    logits = []
    for quantization in ("int8", "none"):
        head = EagleHead(directory, engine, 8, linears(quantization))
        part = LayerPart(head.layer.open(), 6)
        logits.append(head.logits(head([7, 1, 30, 8, 9, 2], head.features(states), [part])))
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-3 * np.abs(logits[1]).max())


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_ids_are_those_of_plain_decoding(deep_dirs, tmp_path, quantization):
    engine = open_engine(deep_dirs["INT8"], "cpu", threads=1)
    values = eagle_values(engine.config, hidden_size=42, draft_vocab_size=90)
    directory = write_eagle(tmp_path / "head", values, eagle_tensors(engine.config, True, values))
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True)
    prompt = random_ids(engine.config, 8, seed=8)
    drafter = make_drafter(f"eagle:{directory}", {"quantization": quantization})
    drafted = Runner(engine, drafter=drafter, max_draft_len=7)
    found = drafted.generate(prompt, params)[0].outputs[0].token_ids
    assert found == Runner(engine).generate(prompt, params)[0].outputs[0].token_ids
    assert drafted.stats.num_draft_tokens > 20


@pytest.mark.parametrize("name", ["medusa:heads", "eagle:head"])
def test_another_quantization_is_refused(name):
    with pytest.raises(QuasarError, match="unknown quantization of a head 'int4'; one of: int8, none"):
        make_drafter(name, {"quantization": "int4"})
