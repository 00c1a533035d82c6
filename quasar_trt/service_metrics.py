"""What requests had to wait for, and what they were spared: of one request or of all of a runner's."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields

from quasar_trt.latencies import Latencies


@dataclass
class ServiceMetrics:
    """Waiting, preemption and reuse.

    time_to_first_token: from submitting a request, its time in the queue included.
    inter_token: between two passes that emitted tokens of a request, divided by the tokens of the later one and counted
        once for each of them, so that the mean is the time per token.
    num_preemptions: how often a running request lost its cache to older ones.
    num_reused_tokens: tokens whose keys and values came from another request.
    num_finished: requests that ended, aborted ones included.
    """

    time_to_first_token: Latencies = field(default_factory=Latencies)
    inter_token: Latencies = field(default_factory=Latencies)
    num_preemptions: int = 0
    num_reused_tokens: int = 0
    num_finished: int = 0

    def count(self, num_emitted_tokens: int, age: float, since_last: float | None) -> None:
        """A pass emitted tokens of a request: seconds since it was submitted, and since it emitted before, if it did."""
        if since_last is None:
            self.time_to_first_token.add(age)
        else:
            self.inter_token.add(since_last / num_emitted_tokens, num_emitted_tokens)

    def snapshot(self) -> ServiceMetrics:
        """A copy that stays as it is."""
        return copy.deepcopy(self)

    def __add__(self, other: ServiceMetrics) -> ServiceMetrics:
        return ServiceMetrics(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )

    def __sub__(self, before: ServiceMetrics) -> ServiceMetrics:
        """What happened since the snapshot `before`."""
        return ServiceMetrics(
            **{each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)}
        )


@dataclass(frozen=True)
class Load:
    """What a runner holds now.

    num_waiting, num_running: requests; each completion of a prompt is one.
    num_kept: finished sequences that wait for requests that begin alike.
    kv_bytes: of the keys and values of running requests and kept sequences; kv_limit: the most that they may take.
    """

    num_waiting: int
    num_running: int
    num_kept: int
    kv_bytes: int
    kv_limit: int
