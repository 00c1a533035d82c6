"""The n-gram drafter (prompt lookup): text that repeats goes on as it did the last time.

The longest suffix of the context, of prompt_lookup_max down to prompt_lookup_min ids, that occurred earlier is looked up;
the ids that followed its most recent earlier occurrence are proposed. Deterministic, so drafts carry no probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest, check_num_speculative_tokens
from quasar_trt.drafters.estimates import AcceptanceEstimates
from quasar_trt.errors import QuasarError, named_options

_DEPTHS = 8  # places of a draft that are told apart in the estimates; the last one is "or later"


@named_options("ngram drafter option")
@dataclass(frozen=True)
class NgramOptions:
    """num_speculative_tokens: the most draft tokens per request and step; None for as many as the engine allows.

    prompt_lookup_max, prompt_lookup_min: the longest and the shortest suffix, in ids, that is looked up.
    """

    num_speculative_tokens: int | None = None
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1

    def __post_init__(self):
        check_num_speculative_tokens(self.num_speculative_tokens)
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise QuasarError(f"{name} is {value!r}; allowed: an integer of at least 1")
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
        # A match that is being compared with what comes: its start, its n, where it was found, how many tokens were right.
        self._watched: tuple[int, int, int, int] | None = None

    def find(self, ahead: Sequence[int] = ()) -> tuple[int, int] | None:
        """(start, n): the position after the most recent earlier occurrence of the longest suffix that has one, its n.

        ahead: ids behind the context; the suffix is then that of both.
        """
        context = self._context
        last = len(context) - 1
        for end in range(self._num_indexed, last):  # the suffix itself ends at `last` and stays out: it is no match
            for n, followers in self._followers.items():
                if end + 1 >= n:
                    followers[tuple(context[end + 1 - n : end + 1])] = end + 1
        self._num_indexed = max(self._num_indexed, last)
        text = [*context[-self._sizes[0] :], *ahead] if ahead else context
        for n, followers in self._followers.items():  # longest first
            start = followers.get(tuple(text[-n:]))
            if start is not None:
                if not ahead:
                    self._watched = self._watched or (start, n, len(context), 0)
                return start, n
        return None

    def learn(self, estimates: AcceptanceEstimates) -> None:
        """Compares what was found with what the context has gained since, up to the first difference.

        One match at a time is watched, over several steps if need be: whether its later tokens were right does not depend
        on how many of them were drafted.
        """
        if self._watched is None:
            return
        start, n, position, depth = self._watched
        self._watched = None
        while depth < min(_DEPTHS, position - start):  # a draft ends where the context ended
            if position + depth == len(self._context):
                self._watched = start, n, position, depth
                return
            right = self._context[position + depth] == self._context[start + depth]
            estimates.count(_kind(n, depth), right)
            if not right:
                return
            depth += 1


def _kind(n: int, depth: int) -> int:
    return (n - 1) * _DEPTHS + min(depth, _DEPTHS - 1)


class NgramDrafter(Drafter):
    """Prompt lookup over each request's own context."""

    def __init__(self, options: NgramOptions):
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens
        # Before anything is known, a match of n + depth ids that held so far goes on holding with 1 - 0.75^(n + depth).
        self._estimates = AcceptanceEstimates(
            [1 - 0.75 ** (n + depth) for n in range(1, options.prompt_lookup_max + 1) for depth in range(_DEPTHS)]
        )
        self._indexes: dict[int, _Index] = {}

    def start(self, request_id: int, context: Sequence[int]) -> None:
        self._indexes[request_id] = _Index(context, self.options)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose_one(request) for request in batch]

    def _propose_one(self, request: DraftRequest) -> Draft:
        index = self._indexes[request.request_id]
        index.learn(self._estimates)
        found = index.find(request.ahead)
        if found is None:
            return NO_DRAFT
        start, n = found
        ids = tuple(request.context[start : start + request.limit])
        return Draft(ids, estimates=tuple([self._estimates.of[_kind(n, depth)] for depth in range(len(ids))]))

    def stop(self, request_id: int) -> None:
        del self._indexes[request_id]
