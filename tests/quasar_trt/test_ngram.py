"""Prompt lookup: what is proposed, at every edge, incrementally as from scratch."""

from __future__ import annotations

import numpy as np
import pytest

from quasar_trt.drafters.base import DraftRequest
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams

SAMPLER = Sampler(SamplingParams())


def propose(context: list[int], limit: int = 5, **options) -> list[int]:
    drafter = make_drafter("ngram", options)
    drafter.start(0, context)
    (draft,) = drafter.propose([DraftRequest(0, context, limit, SAMPLER)])
    assert draft.probs is None and draft.parents is None
    return list(draft.ids)


def plain_lookup(context: list[int], limit: int, longest: int, shortest: int, count: int) -> list[int]:
    """The definition, by search."""
    for n in range(min(longest, len(context) - 1), shortest - 1, -1):
        for end in range(len(context) - 2, n - 2, -1):
            if context[end + 1 - n : end + 1] == context[-n:]:
                return context[end + 1 : end + 1 + min(limit, count)]
    return []


@pytest.mark.parametrize(
    ("name", "context", "options", "expected"),
    [
        (
            "followers of the match",
            [1, 2, 3, 9, 1, 2, 3],
            {"prompt_lookup_max": 3},
            [9, 1, 2, 3],
        ),
        ("one id", [1], {}, []),
        ("shorter than the shortest suffix", [1, 1], {"prompt_lookup_max": 3, "prompt_lookup_min": 3}, []),
        ("only match is the suffix itself", [1, 2, 3], {}, []),
        ("match at the end has few followers", [5, 5], {}, [5]),
        ("two followers", [1, 2, 1, 2], {}, [1, 2]),
        ("most recent match", [1, 7, 1, 8, 1], {}, [8, 1]),
        ("longer suffix beats a more recent shorter one", [1, 2, 7, 5, 2, 8, 1, 2], {}, [7, 5, 2, 8, 1]),
        ("shorter suffix when the longer has no match", [2, 7, 5, 3, 2], {}, [7, 5, 3, 2]),
        ("prompt_lookup_min forbids the shorter", [2, 7, 5, 3, 2], {"prompt_lookup_min": 2}, []),
    ],
)
def test_proposal(name, context, options, expected):
    assert propose(context, **options) == expected, name


def test_limit_shortens_the_proposal():
    assert propose([1, 2, 3, 4, 1], limit=1) == [2]


@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (1, 1), (5, 2)])
def test_growing_context_gives_what_a_search_gives(longest, shortest):
    generator = np.random.default_rng(longest)
    options = {"prompt_lookup_max": longest, "prompt_lookup_min": shortest, "num_speculative_tokens": 4}
    drafter = make_drafter("ngram", options)
    context = generator.integers(0, 4, 3).tolist()
    drafter.start(8, context)
    for _ in range(150):
        (draft,) = drafter.propose([DraftRequest(8, context, 3, SAMPLER)])
        assert list(draft.ids) == plain_lookup(context, 3, longest, shortest, 4)
        context.extend(generator.integers(0, 4, generator.integers(1, 4)).tolist())


def test_requests_do_not_share_their_contexts():
    drafter = make_drafter("ngram", {})
    contexts = {1: [1, 2, 1], 2: [1, 3, 1]}
    for request_id, context in contexts.items():
        drafter.start(request_id, context)
    drafts = drafter.propose(
        [DraftRequest(request_id, context, 5, SAMPLER) for request_id, context in contexts.items()]
    )
    assert [draft.ids for draft in drafts] == [(2, 1), (3, 1)]
    drafter.stop(1)
    assert drafter.propose([DraftRequest(2, contexts[2], 5, SAMPLER)])[0].ids == (3, 1)
