"""Rounding that makes up for its own error: the textbook's codes, a smaller output error, and every degenerate input."""

from __future__ import annotations

import pytest
import torch

from quasar_trt.builders import gptq
from quasar_trt.builders.gptq import input_factor, quantize_gptq
from quasar_trt.builders.quantize import quantize_rows


def problem(rows: int = 200, columns: int = 96, outputs: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, inputs): channels of different sizes that follow a few common causes, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    causes = torch.randn(rows, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
    noise = torch.randn(rows, columns, generator=generator)
    sizes = torch.rand(columns, generator=generator).add(0.1)
    return torch.randn(outputs, columns, generator=generator) * 0.05, (causes + noise) * sizes


def textbook(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Codes [n, k] of GPTQ as published, in float64: act-order, inverse Hessian, its upper Cholesky factor, one column at a
    time, the rest of the row updated at once."""
    weight, inputs = weight.double(), inputs.double()
    scale = weight.abs().amax(dim=1) / 127
    hessian = inputs.T @ inputs
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
    order = hessian.diagonal().argsort(descending=True)
    inverse = torch.linalg.inv(hessian[order][:, order])
    upper = torch.linalg.cholesky(inverse, upper=True)
    weight, codes = weight[:, order].clone(), torch.empty(weight.shape)
    for j in range(len(order)):
        codes[:, order[j]] = torch.round(weight[:, j] / scale).clamp(-127, 127).float()
        error = (weight[:, j] - codes[:, order[j]].double() * scale) / upper[j, j]
        weight[:, j:] -= error[:, None] * upper[j, j:]
    return codes


def quantized(weight: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_gptq(weight, input_factor(inputs))


def differing_rows(first: torch.Tensor, second: torch.Tensor) -> int:
    """A value at a tie may round either way, and then every later one of its row is another."""
    return int((first.float() != second.float()).any(dim=1).sum())


def output_error(weight: torch.Tensor, inputs: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float:
    difference = (codes * scale.T - weight).double()
    return float((inputs.double() @ difference.T).norm())


@pytest.mark.parametrize("shape", [(200, 96), (30, 96), (300, 64), (300, 65), (300, 128), (50, 7)], ids=str)
def test_codes_are_those_of_the_textbook(shape):
    weight, inputs = problem(*shape)
    codes, _ = quantized(weight, inputs)
    assert codes.dtype == torch.int8 and codes.shape == weight.shape
    assert differing_rows(codes, textbook(weight, inputs)) <= 2  # of 40, at ties in float32


@pytest.mark.parametrize("seed", range(8))
def test_the_output_error_is_well_below_that_of_rounding_to_nearest(seed):
    weight, inputs = problem(seed=seed)
    found = output_error(weight, inputs, *quantized(weight, inputs))
    assert found < 0.7 * output_error(weight, inputs, *quantize_rows(weight))
    _, unseen = problem(seed=seed + 100)
    unrelated = output_error(weight, unseen, *quantized(weight, inputs))
    assert unrelated > found  # it is these inputs that it was fitted to


def test_scales_are_those_of_rounding_to_nearest():
    weight, inputs = problem()
    weight[3] = 0
    assert torch.equal(quantized(weight, inputs)[1], quantize_rows(weight)[1])


def test_weights_that_are_codes_already_stay():
    _, inputs = problem()
    codes = torch.randint(-127, 128, (40, 96), generator=torch.Generator().manual_seed(1))
    codes[:, 5] = 127
    found, scale = quantized(codes * 0.25, inputs)
    assert torch.equal(found, codes.to(torch.int8)) and torch.equal(scale, torch.full((1, 40), 0.25))


def test_a_row_of_zeros_has_codes_of_zero():
    weight, inputs = problem()
    weight[3] = 0
    codes, scale = quantized(weight, inputs)
    assert not codes[3].any() and scale[0, 3] == 1


def test_an_input_that_was_always_zero_is_rounded_to_nearest_and_touches_no_other():
    weight, inputs = problem()
    inputs[:, 17] = 0
    codes, _ = quantized(weight, inputs)
    assert torch.equal(codes[:, 17], quantize_rows(weight)[0][:, 17])
    others = [j for j in range(96) if j != 17]
    weight[:, others[0]] = weight.abs().amax(dim=1)  # so that the scales stay without channel 17
    codes, _ = quantized(weight, inputs)
    assert differing_rows(codes[:, others], textbook(weight, inputs)[:, others]) <= 2


def test_inputs_that_are_all_zero_give_rounding_to_nearest():
    weight, inputs = problem()
    codes, scale = quantized(weight, torch.zeros_like(inputs))
    assert torch.equal(codes, quantize_rows(weight)[0]) and torch.equal(scale, quantize_rows(weight)[1])


def test_a_single_row_of_inputs_is_reproduced_closely():
    weight, inputs = problem(rows=1)
    codes, scale = quantized(weight, inputs)
    assert output_error(weight, inputs, codes, scale) < 0.2 * output_error(weight, inputs, *quantize_rows(weight))


@pytest.mark.parametrize("size", [1e-18, 1e18, 1e30])
def test_the_size_of_the_inputs_does_not_matter(size):
    weight, inputs = problem()
    assert differing_rows(quantized(weight, inputs * size)[0], quantized(weight, inputs)[0]) <= 2


@pytest.mark.parametrize("block", [1, 7, 96, 1000])
def test_blocks_only_group_the_products(block, monkeypatch):
    weight, inputs = problem()
    expected, _ = quantized(weight, inputs)
    monkeypatch.setattr(gptq, "_BLOCK", block)
    assert differing_rows(quantized(weight, inputs)[0], expected) <= 2


def test_a_factorization_that_fails_in_float32_is_made_in_float64(monkeypatch):
    weight, inputs = problem()
    expected, _ = quantized(weight, inputs)
    failed = (torch.full((96, 96), torch.nan), torch.tensor(5))
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda moment: failed)
    assert differing_rows(quantized(weight, inputs)[0], expected) <= 2


def test_the_same_inputs_give_the_same_codes_and_stay_as_they_are():
    weight, inputs = problem()
    kept = weight.clone(), inputs.clone()
    first, second = quantized(weight, inputs), quantized(weight, inputs)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert torch.equal(weight, kept[0]) and torch.equal(inputs, kept[1])
