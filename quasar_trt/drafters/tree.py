"""A draft that branches grows where it is likeliest to be accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from quasar_trt.drafters.base import NO_DRAFT, Draft

State = TypeVar("State")


def likeliest_tree(
    start: State, continuations: Callable[[State], Iterable[tuple[int, float, State]]], limit: int
) -> Draft:
    """The `limit` likeliest tokens of the tree of all continuations, the likeliest first.

    continuations: what may follow a state, as (token, estimate of its acceptance given that the state is right, the state
        after it); estimates are at most 1.
    """
    ids: list[int] = []
    parents: list[int] = []
    estimates: list[float] = []
    order = count()  # equally likely tokens come in the order in which they were found
    open_: list[tuple[float, int, int, int, float, State]] = []
    state, parent, probability = start, -1, 1.0
    while True:
        for token, estimate, after in continuations(state):
            heappush(open_, (-probability * estimate, next(order), parent, token, estimate, after))
        if len(ids) == limit or not open_:
            return Draft(tuple(ids), tuple(parents), estimates=tuple(estimates)) if ids else NO_DRAFT
        negative, _, above, token, estimate, state = heappop(open_)
        parent, probability = len(ids), -negative
        ids.append(token)
        parents.append(above)
        estimates.append(estimate)
