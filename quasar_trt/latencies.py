"""How long something took, many times: a histogram of bounded size that can be added and subtracted."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

_PER_DOUBLING = 8  # buckets; neighbouring bounds differ by 9 %


@dataclass
class Latencies:
    """Seconds, counted in buckets whose bounds grow by 2^(1/8), from a microsecond on.

    count, total: how many, and their sum in seconds.
    """

    count: int = 0
    total: float = 0.0
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float, times: int = 1) -> None:
        self.count += times
        self.total += times * seconds
        self.buckets[max(math.ceil(_PER_DOUBLING * math.log2(max(seconds, 1e-9) / 1e-6)), 0)] += times

    @property
    def mean(self) -> float:
        """Seconds; 0.0 where there is nothing."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Seconds that `share` (0 to 1) of all do not exceed, up to 9 % too many; 0.0 where there is nothing."""
        seen = 0
        for bucket, times in sorted(self.buckets.items()):
            seen += times
            if seen and seen >= share * self.count:
                return 1e-6 * 2 ** (bucket / _PER_DOUBLING)
        return 0.0

    def count_within(self, doublings: int) -> int:
        """How many took at most 2^doublings microseconds."""
        return sum(times for bucket, times in self.buckets.items() if bucket <= _PER_DOUBLING * doublings)

    def __add__(self, other: Latencies) -> Latencies:
        return Latencies(self.count + other.count, self.total + other.total, self.buckets + other.buckets)

    def __sub__(self, before: Latencies) -> Latencies:
        """What came since the snapshot `before`."""
        return Latencies(self.count - before.count, self.total - before.total, self.buckets - before.buckets)
