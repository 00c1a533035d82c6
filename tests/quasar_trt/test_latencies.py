"""Histograms of latencies: quantiles within a bucket, sums and differences."""

from __future__ import annotations

import numpy as np

from quasar_trt.latencies import Latencies
from quasar_trt.service_metrics import ServiceMetrics

WIDTH = 2 ** (1 / 8)  # of a bucket


def test_nothing_gives_zero():
    assert (Latencies().mean, Latencies().quantile(0.5)) == (0.0, 0.0)


def test_quantiles_are_at_most_a_bucket_too_large():
    seconds = np.random.default_rng(1).lognormal(-4.0, 2.0, 999)
    latencies = Latencies()
    for each in seconds:
        latencies.add(float(each))
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = float(np.quantile(seconds, share, method="inverted_cdf"))
        assert exact <= latencies.quantile(share) * (1 + 1e-12) and latencies.quantile(share) <= exact * WIDTH
    assert np.isclose(latencies.mean, seconds.mean(), rtol=1e-12)


def test_the_shortest_and_several_at_once_count():
    latencies = Latencies()
    latencies.add(0.0)
    latencies.add(1.0, times=3)
    assert (latencies.count, latencies.total) == (4, 3.0)
    assert latencies.quantile(0.25) == 1e-6 and 1.0 <= latencies.quantile(0.3) <= WIDTH


def test_sums_and_differences_of_service_metrics():
    first, second = ServiceMetrics(num_preemptions=1), ServiceMetrics(num_reused_tokens=5, num_finished=1)
    first.count(2, 0.5, None)
    second.count(1, 0.25, None)
    second.count(4, 1.0, 0.8)
    both = first + second
    assert (both.num_preemptions, both.num_reused_tokens, both.num_finished) == (1, 5, 1)
    assert (both.time_to_first_token.count, both.time_to_first_token.total) == (2, 0.75)
    assert (both.inter_token.count, both.inter_token.mean) == (4, 0.2)
    assert both - first == second and both - second == first
    before = both.snapshot()
    both.count(1, 1.0, 0.5)
    assert (both - before).inter_token.count == 1


def test_counts_within_a_bound():
    latencies = Latencies()
    for seconds in (1e-6, 0.9e-3, 1.024e-3, 1.1e-3, 5.0):
        latencies.add(seconds)
    assert [latencies.count_within(doublings) for doublings in (0, 9, 10, 11, 22, 23)] == [1, 1, 3, 4, 4, 5]
