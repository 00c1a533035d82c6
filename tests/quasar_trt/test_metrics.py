"""Counts, ratios and differences of speculation metrics."""

from __future__ import annotations

from quasar_trt.metrics import SpeculationMetrics


def test_nothing_counted_gives_zero_not_nan():
    metrics = SpeculationMetrics()
    assert (metrics.mean_acceptance_length, metrics.acceptance_rate) == (0.0, 0.0)


def test_counts_and_ratios():
    metrics = SpeculationMetrics()
    metrics.count(num_draft_tokens=3, num_accepted_tokens=1, num_emitted_tokens=2)
    metrics.count(num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=1)
    metrics.count(num_draft_tokens=5, num_accepted_tokens=5, num_emitted_tokens=6)
    assert (metrics.num_verify_steps, metrics.num_drafts, metrics.num_draft_tokens) == (3, 2, 8)
    assert (metrics.num_accepted_tokens, metrics.num_emitted_tokens) == (6, 9)
    assert metrics.num_accepted_tokens_per_pos == [2, 1, 1, 1, 1]
    assert (metrics.mean_acceptance_length, metrics.acceptance_rate) == (3.0, 0.75)


def test_difference_to_a_snapshot():
    metrics = SpeculationMetrics()
    metrics.count(2, 1, 2)
    metrics.add_seconds(0.5, 1.0, 0.25)
    before = metrics.snapshot()
    metrics.count(3, 3, 4)
    metrics.add_seconds(0.5, 2.0, 0.25)
    used = metrics - before
    assert (used.num_verify_steps, used.num_draft_tokens, used.num_accepted_tokens_per_pos) == (1, 3, [1, 1, 1])
    assert (used.draft_seconds, used.verify_seconds, used.accept_seconds) == (0.5, 2.0, 0.25)
