"""Metrics in Prometheus' words: vLLM's names after another prefix, as far as they mean the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from quasar_trt.latencies import Latencies
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.service_metrics import Load, ServiceMetrics

_PREFIX = "quasar_trt:"
_DOUBLINGS = range(8, 28)  # bounds of the histograms: 2^8 us = 0.26 ms to 2^27 us = 134 s


class ServerMetrics:
    """Counts what the server does; what the runner did is given to `render`."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self._responses = Counter(
            f"{_PREFIX}http_requests", "HTTP requests by path and status.", ["path", "status"], registry=self._registry
        )
        self._finished = Counter(
            f"{_PREFIX}request_success",
            "Completions by the reason of their end.",
            ["finished_reason"],
            registry=self._registry,
        )
        self._prompt_tokens = Counter(f"{_PREFIX}prompt_tokens", "Tokens of prompts.", registry=self._registry)

    def count_response(self, path: str, status: str) -> None:
        self._responses.labels(path, status).inc()

    def count_completions(self, num_prompt_tokens: int, reasons: Iterable[str]) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        for reason in reasons:
            self._finished.labels(reason).inc()

    def render(self, stats: SpeculationMetrics, service: ServiceMetrics, load: Load) -> tuple[bytes, str]:
        """The text, and its content type."""
        registry = CollectorRegistry()
        registry.register(_Families([*self._registry.collect(), *_families(stats, service, load)]))
        return generate_latest(registry), CONTENT_TYPE_LATEST


class _Families:
    """Metrics that are there already, as a collector."""

    def __init__(self, families: Sequence):
        self._families = families

    def collect(self) -> Sequence:
        return self._families


def _families(stats: SpeculationMetrics, service: ServiceMetrics, load: Load) -> Iterator:
    for name, text, value in (
        ("num_requests_running", "Completions that are computed.", load.num_running),
        ("num_requests_waiting", "Completions that wait.", load.num_waiting),
        ("num_sequences_kept", "Finished sequences kept for prompts that begin alike.", load.num_kept),
        ("kv_cache_bytes", "Bytes of keys and values.", load.kv_bytes),
        ("kv_cache_limit_bytes", "Most bytes of keys and values.", load.kv_limit),
        ("kv_cache_usage_perc", "Share of the limit that is taken, 0 to 1.", load.kv_bytes / max(load.kv_limit, 1)),
    ):
        yield GaugeMetricFamily(_PREFIX + name, text, value)
    for name, text, value in (
        ("generation_tokens", "Emitted tokens.", stats.num_emitted_tokens),
        ("prefix_cache_hits", "Tokens whose keys and values came from another sequence.", service.num_reused_tokens),
        ("num_preemptions", "Times that a completion lost its cache to older ones.", service.num_preemptions),
        ("spec_decode_num_verify_steps", "Passes that scored rows of a completion.", stats.num_verify_steps),
        ("spec_decode_num_drafts", "Drafts that were not empty.", stats.num_drafts),
        ("spec_decode_num_draft_tokens", "Draft tokens that were verified.", stats.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", stats.num_accepted_tokens),
        ("draft_seconds", "Time that passes took to draft.", stats.draft_seconds),
        ("verify_seconds", "Time that passes took in the engine.", stats.verify_seconds),
        ("accept_seconds", "Time that passes took to accept.", stats.accept_seconds),
    ):
        yield CounterMetricFamily(_PREFIX + name, text, value)
    per_position = CounterMetricFamily(
        f"{_PREFIX}spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", labels=["position"]
    )
    for position, count in enumerate(stats.num_accepted_tokens_per_pos):
        per_position.add_metric([str(position)], count)
    yield per_position
    yield _histogram("time_to_first_token_seconds", "From the request to its first token.", service.time_to_first_token)
    yield _histogram("inter_token_latency_seconds", "From one token to the next.", service.inter_token)


def _histogram(name: str, text: str, latencies: Latencies) -> HistogramMetricFamily:
    bounds = [(str(1e-6 * 2**doublings), latencies.count_within(doublings)) for doublings in _DOUBLINGS]
    return HistogramMetricFamily(_PREFIX + name, text, [*bounds, ("+Inf", latencies.count)], latencies.total)
