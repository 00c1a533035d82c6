"""The searched smoothing: never worse than the textbook's on its own criterion, finite on dead channels, repeatable."""

from __future__ import annotations

import math

import pytest
import torch

from quasar_trt.builders import search as search_module
from quasar_trt.builders.quantize import quantize_rows
from quasar_trt.builders.search import ALPHAS, Trial, input_statistics, search
from quasar_trt.builders.smooth import smoother
from quasar_trt.plugins.reference import LINEAR, hadamard, smooth_quantize

# Columns of the Hadamard blocks, bits of the activations.
ARITHMETICS = [(0, 8), (32, 8), (0, 16), (32, 16)]


def outlier_input(rows: int = 96, columns: int = 128, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.rand(columns, generator=generator).add(0.1)
    x[:, 7] *= 100
    return x, torch.randn(64, columns, generator=generator) * 0.05


def test_the_statistics_are_what_they_say():
    x = torch.tensor([[3.0, -1.0]] * 99 + [[-4.0, 100.0]])
    found = input_statistics(x, x)
    assert found["max"].tolist() == [4.0, 100.0]
    assert found["3rms"].tolist() == pytest.approx([3 * (9.07) ** 0.5, 3 * (100.99) ** 0.5])
    assert found["p99"].tolist() == [3.0, 1.0]


def textbook(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return smoother(x.abs().amax(0), weight.abs().amax(0), 0.5)


@pytest.mark.parametrize(("block", "bits"), ARITHMETICS)
def test_the_error_is_that_of_the_engines_arithmetic(block, bits):
    x, weight = outlier_input()
    s = textbook(x, weight)
    exact = x @ weight.T
    scaled = weight * s
    codes, scale = quantize_rows(hadamard(scaled, block) if block else scaled)
    found = LINEAR[bits](*smooth_quantize(x, 1 / s, block, bits), codes, scale, None)
    expected = float((found - exact).norm() / exact.norm())
    assert Trial(x, weight, block, bits).error(s) == pytest.approx(expected, rel=2e-3)


def test_a_trial_may_be_asked_again():
    x, weight = outlier_input()
    kept = x.clone(), weight.clone()
    trial = Trial(x, weight, 32)
    s = textbook(x, weight)
    first = trial.error(s)
    assert trial.error(torch.ones(128)) != first == trial.error(s)
    assert torch.equal(x, kept[0]) and torch.equal(weight, kept[1])


def test_blocks_and_bits_act():
    x, weight = outlier_input()
    s = torch.ones(128)
    plain, mixed, fine = (Trial(x, weight, *arithmetic).error(s) for arithmetic in ((0, 8), (32, 8), (0, 16)))
    assert mixed < 0.5 * plain  # the outlier is shared by 32 columns
    assert fine < 0.5 * plain  # what is left is the error of the weights


@pytest.mark.parametrize(("block", "bits"), ARITHMETICS)
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_never_worse_than_the_textbook(seed, block, bits):
    x, weight = outlier_input(seed=seed)
    if seed % 2:
        x[5, 40:60] *= 30  # a row that the maximum heeds and the others need not
    trial = Trial(x, weight, block, bits)
    choice = search(x, trial)
    assert choice.error <= trial.error(textbook(x, weight))
    sizes = input_statistics(x, x)[choice.statistic]
    assert torch.equal(choice.smoother, smoother(sizes, weight.abs().amax(0), choice.alpha))
    assert choice.error == trial.error(choice.smoother)
    assert choice.report() == {"alpha": choice.alpha, "statistic": choice.statistic, "error": choice.error}
    again = search(x, Trial(x, weight, block, bits))
    assert again.report() == choice.report() and torch.equal(again.smoother, choice.smoother)


@pytest.mark.parametrize("statistic", ["max", "3rms", "p99"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_every_exponent_and_statistic_can_be_chosen(monkeypatch, alpha, statistic):
    x, weight = outlier_input(rows=200)  # enough for the 99th percentile to differ from the maximum
    wanted = input_statistics(x, x)[statistic]
    monkeypatch.setattr(search_module, "smoother", lambda sizes, columns, exponent: (sizes, exponent))
    monkeypatch.setattr(Trial, "error", lambda self, s: abs(s[1] - alpha) + (not torch.equal(s[0], wanted)))
    choice = search(x, Trial(x, weight))
    assert (choice.statistic, choice.alpha, choice.error) == (statistic, alpha, 0)


def test_more_rows_than_are_judged_are_still_seen_by_the_maximum():
    x, weight = outlier_input(rows=2 * search_module._ROWS + 3)
    trial = Trial(x, weight)
    assert len(trial.x) == search_module._ROWS
    assert torch.equal(trial.x[0], x[0]) and torch.equal(trial.x[-1], x[-1])
    x[1, 3] = 1e4  # not among the judged rows
    assert input_statistics(x, trial.x)["max"][3] == 1e4
    assert torch.isfinite(search(x, trial).smoother).all()


def test_weights_that_are_not_judged_are_still_seen_by_the_maximum():
    x, weight = outlier_input()
    weight = weight.repeat(2 * search_module._OUTPUTS // len(weight) + 1, 1)
    weight[1, 3] = 1e4  # not among the judged channels
    trial = Trial(x, weight)
    assert trial.weight_maxima[3] == 1e4
    found = search(x, trial)
    sizes = input_statistics(x, x)[found.statistic]
    assert torch.equal(found.smoother, smoother(sizes, weight.abs().amax(0), found.alpha))


def test_dead_channels_and_zero_rows_stay_finite():
    x, weight = outlier_input()
    x[:, 3], weight[:, 9], weight[11] = 0, 0, 0
    x[4] = 0
    choice = search(x, Trial(x, weight))
    assert choice.smoother[3] == choice.smoother[9] == 1
    assert torch.isfinite(choice.smoother).all() and (choice.smoother > 0).all()
    assert 0 < choice.error < 0.05
    silent = torch.zeros_like(x)
    choice = search(silent, Trial(silent, weight))
    assert (choice.error, choice.statistic, choice.alpha) == (0.0, "max", 0.5)
    assert search(x, Trial(x, torch.zeros_like(weight))).error == 0


def test_an_output_that_leaves_float32_has_no_choice():
    x, weight = outlier_input()
    trial = Trial(x, weight * 1e38)
    assert not math.isfinite(trial.error(torch.ones(128)))
    assert search(x, trial) is None
