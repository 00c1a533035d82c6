"""Counts and times of speculation, for one request or for all of a runner's."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from itertools import zip_longest


@dataclass
class SpeculationMetrics:
    """What speculation did.

    num_verify_steps: passes that scored rows of a request (its first token comes from one too); a pass over several
        requests counts once for each.
    num_drafts: drafts that were not empty.
    num_accepted_tokens_per_pos: entry i counts the drafts of which more than i tokens, in a row, were accepted.
    draft_seconds, verify_seconds, accept_seconds: wall time of the steps that a request took part in, its neighbours'
        share included; verifying is the engine's pass without acceptance, prompts included.
    """

    num_verify_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0

    def count(self, num_draft_tokens: int, num_accepted_tokens: int, num_emitted_tokens: int) -> None:
        """One verify step of one request."""
        self.num_verify_steps += 1
        self.num_emitted_tokens += num_emitted_tokens
        if num_draft_tokens:
            self.num_drafts += 1
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += num_accepted_tokens
            per_pos = self.num_accepted_tokens_per_pos
            per_pos.extend([0] * (num_draft_tokens - len(per_pos)))
            for position in range(num_accepted_tokens):
                per_pos[position] += 1

    def add_seconds(self, draft: float, verify: float, accept: float) -> None:
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.accept_seconds += accept

    def snapshot(self) -> SpeculationMetrics:
        """A copy that stays as it is."""
        return copy.deepcopy(self)

    def __add__(self, other: SpeculationMetrics) -> SpeculationMetrics:
        return self._combined(other, 1)

    def __sub__(self, before: SpeculationMetrics) -> SpeculationMetrics:
        """What happened since the snapshot `before`."""
        return self._combined(before, -1)

    def _combined(self, other: SpeculationMetrics, sign: int) -> SpeculationMetrics:
        values = {item.name: (getattr(self, item.name), getattr(other, item.name)) for item in fields(self)}
        pairs = zip_longest(*values.pop("num_accepted_tokens_per_pos"), fillvalue=0)
        return SpeculationMetrics(
            num_accepted_tokens_per_pos=[a + sign * b for a, b in pairs],
            **{name: a + sign * b for name, (a, b) in values.items()},
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per verify step; 0.0 before the first."""
        return self.num_emitted_tokens / self.num_verify_steps if self.num_verify_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted per draft token; 0.0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


def stats_line(stats: SpeculationMetrics, tokens_per_second: float | None) -> str:
    """One line about acceptance and speed, in the words of llama.cpp."""
    parts = []
    if stats.num_draft_tokens:
        accepted = f"{stats.num_accepted_tokens} accepted / {stats.num_draft_tokens} drafted"
        parts.append(f"draft acceptance = {stats.acceptance_rate:.3f} ({accepted})")
    parts.append(f"mean acceptance length = {stats.mean_acceptance_length:.2f}")
    if tokens_per_second is not None:
        parts.append(f"{tokens_per_second:.1f} tokens/s")
    return ", ".join(parts)
