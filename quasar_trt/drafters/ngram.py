"""The n-gram drafter (prompt lookup): text that repeats goes on as it did the last time.

The longest suffix of the context, of prompt_lookup_max down to prompt_lookup_min ids, that occurred earlier is looked up;
the ids that followed its most recent earlier occurrence are proposed. Deterministic, so drafts carry no probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest
from quasar_trt.errors import QuasarError, named_options


@named_options("ngram drafter option")
@dataclass(frozen=True)
class NgramOptions:
    """num_speculative_tokens: the most draft tokens per step.

    prompt_lookup_max, prompt_lookup_min: the longest and the shortest suffix, in ids, that is looked up.
    """

    num_speculative_tokens: int = 5
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1

    def __post_init__(self):
        for option in fields(self):
            value = getattr(self, option.name)
            if type(value) is not int or value < 1:
                raise QuasarError(f"{option.name} is {value!r}; allowed: an integer of at least 1")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise QuasarError(
                f"prompt_lookup_min is {self.prompt_lookup_min}; allowed: at most prompt_lookup_max, which is "
                f"{self.prompt_lookup_max}"
            )


class _Index:
    """Where each n-gram of one context ended last, for every n; grows with the context, one entry per n and id."""

    def __init__(self, context: Sequence[int], options: NgramOptions):
        self._context = context
        self._sizes = range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1)
        self._followers: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._sizes}
        self._num_indexed = 0  # n-grams that end before this position are in

    def find(self) -> int | None:
        """Position after the most recent earlier occurrence of the longest suffix that has one."""
        context = self._context
        last = len(context) - 1
        for end in range(self._num_indexed, last):  # the suffix itself ends at `last` and stays out: it is no match
            for n, followers in self._followers.items():
                if end + 1 >= n:
                    followers[tuple(context[end + 1 - n : end + 1])] = end + 1
        self._num_indexed = max(self._num_indexed, last)
        for n, followers in self._followers.items():  # longest first
            start = followers.get(tuple(context[-n:]))
            if start is not None:
                return start
        return None


class NgramDrafter(Drafter):
    """Prompt lookup over each request's own context."""

    def __init__(self, options: NgramOptions):
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens
        self._indexes: dict[int, _Index] = {}

    def start(self, request_id: int, context: Sequence[int]) -> None:
        self._indexes[request_id] = _Index(context, self.options)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose_one(request) for request in batch]

    def _propose_one(self, request: DraftRequest) -> Draft:
        start = self._indexes[request.request_id].find()
        if start is None:
            return NO_DRAFT
        count = min(request.limit, self.num_speculative_tokens)
        return Draft(tuple(request.context[start : start + count]))

    def stop(self, request_id: int) -> None:
        del self._indexes[request_id]
