"""The recycle drafter: what the verifier computed and did not use says what may follow each token the next time.

Token recycling (Luo et al., arXiv 2408.08696): every verified row, accepted or not, gives the most probable ids after its
token; a tree of such continuations of the last token is proposed. Instead of a fixed template, the tree grows where its
paths are likeliest by the estimates. Deterministic, so drafts carry no probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quasar_trt.drafters.adjacency import NUM_CANDIDATES, Adjacency, largest
from quasar_trt.drafters.base import Draft, Drafter, DraftRequest, check_num_speculative_tokens
from quasar_trt.drafters.estimates import AcceptanceEstimates
from quasar_trt.drafters.tree import likeliest_tree
from quasar_trt.errors import named_options

# The share of candidates of each kind that were right in answers of a small chat model.
_PRIORS = (0.01, 0.03, 0.03, 0.05, 0.1, 0.17, 0.23, 0.36, 0.5, 0.55, 0.75, 0.55)


@named_options("recycle drafter option")
@dataclass(frozen=True)
class RecycleOptions:
    """num_speculative_tokens: the most draft tokens per request and step; None for as many as the engine allows."""

    num_speculative_tokens: int | None = None

    def __post_init__(self):
        check_num_speculative_tokens(self.num_speculative_tokens)


class RecycleDrafter(Drafter):
    """The likeliest continuations of a request's last token by what rows of any request said about each token."""

    reads_logits = True

    def __init__(self, options: RecycleOptions):
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens
        self._estimates = AcceptanceEstimates(_PRIORS)
        self._adjacency = Adjacency()
        self._contexts: dict[int, Sequence[int]] = {}
        self._read: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # and not put into the adjacency yet

    def start(self, request_id: int, context: Sequence[int]) -> None:
        self._contexts[request_id] = context
        self._adjacency.put_prompt(context)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        estimates = self._estimates.of

        def continuations(token: int):
            return [(each, estimates[kind], each) for each, kind in self._adjacency.candidates(token)]

        def likeliest(token: int):
            return sorted(continuations(token), key=lambda each: -each[1])[:1]

        return [
            likeliest_tree(request.context[-1], continuations if request.tree else likeliest, request.limit)
            for request in batch
        ]

    def read(self, request_id: int, draft: Draft, logits: np.ndarray) -> None:
        tokens = [self._contexts[request_id][-1], *draft.ids]
        ids, values = largest(logits, NUM_CANDIDATES)
        sound = np.isfinite(values[:, 0]) & ~np.isnan(values).any(
            axis=1
        )  # others end their request when their turn comes
        self._read[request_id] = np.array(tokens)[sound], ids[sound], values[sound]

    def observe(self, request_id: int, emitted: Sequence[int], num_accepted_tokens: int) -> None:
        context = self._contexts[request_id]
        before = context[-1 - len(emitted) : -1]
        for token, right in zip(before, emitted, strict=True):  # by what was known when the draft was made
            for candidate, kind in self._adjacency.candidates(token):
                self._estimates.count(kind, candidate == right)
        if request_id in self._read:
            self._adjacency.put(*self._read.pop(request_id))

    def stop(self, request_id: int) -> None:
        del self._contexts[request_id]
        self._read.pop(request_id, None)
