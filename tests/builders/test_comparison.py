"""What two distributions have in common, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quasar_trt.builders.comparison import Comparison, standard_error


def logits(*rows, shift=0.0):
    return torch.tensor(rows, dtype=torch.float32).log() + shift


def test_values_are_those_worked_out_by_hand():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    comparison = Comparison()
    # Windows 0 1 2 0 and 2 0; the engine gives p and q in turn, and a constant that must not matter.
    comparison.add(logits(p, p), logits(p, q, shift=3), [1, 2])
    comparison.add(logits(p, p), logits(p, q, shift=-7), [0])
    comparison.add(logits(p, p), logits(p, p), [0])
    found = comparison.figures()
    far = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found["tokens"] == 6
    assert found["kl"] == pytest.approx(far / 3, abs=1e-7)
    assert found["kl_p99"] == pytest.approx(far, abs=1e-7)
    assert found["top1_agreement"] == pytest.approx(4 / 6)
    assert found["top5_agreement"] == 1.0
    # Runs of 2 rows have the means far / 2, far / 2, 0, and for the agreement 1 / 2, 1 / 2, 1.
    spread = math.sqrt((2 * (1 / 6) ** 2 + (1 / 3) ** 2) / 2)
    assert found["kl_standard_error"] == pytest.approx(far * spread / math.sqrt(3), abs=1e-7)
    assert found["top1_standard_error"] == pytest.approx(spread / math.sqrt(3), abs=1e-12)
    # The ids that follow: 1 under p, 2 under q, 0 under p, 0 under p.
    assert found["source_perplexity"] == pytest.approx(math.exp(-np.log([0.25, 0.25, 0.5, 0.5]).mean()), abs=1e-6)
    assert found["engine_perplexity"] == pytest.approx(math.exp(-np.log([0.25, 0.25, 0.5, 0.5]).mean()), abs=1e-6)


def test_the_standard_error_allows_for_neighbours_that_are_alike():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # 64 runs give the spread to about 10 %.
    assert standard_error(values) == pytest.approx(1 / math.sqrt(4096), rel=0.3)
    alike = values[:512].repeat_interleave(8)  # as good as 512 values
    assert standard_error(alike) == pytest.approx(1 / math.sqrt(512), rel=0.3)
    assert standard_error(torch.tensor([1.0, 3.0])) == pytest.approx(1.0)


def test_perplexities_are_of_each_side():
    comparison = Comparison()
    comparison.add(logits([0.9, 0.1], [0.9, 0.1]), logits([0.4, 0.6], [0.4, 0.6]), [1])
    found = comparison.figures()
    assert found["source_perplexity"] == pytest.approx(10, rel=1e-6)
    assert found["engine_perplexity"] == pytest.approx(1 / 0.6, rel=1e-6)


def test_the_top_five_are_the_engine_s():
    """The source's most probable token is the engine's first, fifth and sixth."""
    source = logits(*[[0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]] * 3)
    engine = torch.tensor([[9.0, 5, 4, 3, 2, 1, 0], [1.5, 5, 4, 3, 2, 1, 0], [0.5, 5, 4, 3, 2, 1, 0]])
    comparison = Comparison()
    comparison.add(source, engine, [0, 0])
    found = comparison.figures()
    assert found["top1_agreement"] == pytest.approx(1 / 3)
    assert found["top5_agreement"] == pytest.approx(2 / 3)


def test_equal_distributions_agree_where_two_tokens_are_equally_probable():
    tied = logits([0.2, 0.4, 0.4], [0.4, 0.4, 0.2])
    comparison = Comparison()
    comparison.add(tied, tied, [0])
    assert comparison.figures()["top1_agreement"] == 1.0


def test_padding_of_the_vocabulary_does_not_count():
    source, engine = logits([0.5, 0.5], [0.9, 0.1]), logits([0.3, 0.7], [0.8, 0.2])
    plain, padded = Comparison(), Comparison()
    plain.add(source, engine, [1])
    padded.add(source, torch.cat([engine, torch.full((2, 3), 50.0)], dim=1), [1])
    assert padded.figures() == plain.figures()


def test_a_token_that_both_exclude_counts_for_nothing_and_one_that_only_the_engine_excludes_for_ever():
    both = Comparison()
    both.add(logits([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]), logits([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]), [1])
    assert both.figures()["kl"] == 0.0
    source_only = Comparison()
    source_only.add(logits([1.0, 0.0], [1.0, 0.0]), logits([0.5, 0.5], [0.5, 0.5]), [0])
    assert source_only.figures()["kl"] == pytest.approx(math.log(2))
    engine_only = Comparison()
    engine_only.add(logits([0.5, 0.5], [0.5, 0.5]), logits([1.0, 0.0], [1.0, 0.0]), [0])
    assert engine_only.figures()["kl"] == math.inf


@pytest.mark.parametrize("side", [0, 1])
def test_a_row_that_is_no_distribution_shows(side):
    rows = [logits([0.5, 0.5], [0.5, 0.5]), logits([0.5, 0.5], [0.5, 0.5])]
    rows[side][1, 0] = math.nan
    comparison = Comparison()
    comparison.add(*rows, [0])
    assert math.isnan(comparison.figures()["kl"])
