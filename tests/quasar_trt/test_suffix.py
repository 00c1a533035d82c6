"""The suffix automaton against plain searches, and what the suffix drafter proposes, expects and remembers."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from stubs import paths

from quasar_trt.drafters import automaton as automaton_module
from quasar_trt.drafters.automaton import Cursor, SuffixAutomaton
from quasar_trt.drafters.base import Draft, DraftRequest
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.errors import QuasarError
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams

SAMPLER = Sampler(SamplingParams())


def ends(text: list[int], part: list[int]) -> list[int]:
    """Positions after each occurrence of `part` in `text`."""
    n = len(part)
    return [start + n for start in range(len(text) - n + 1) if text[start : start + n] == part]


def longest_suffix(text: list[int], other: list[int]) -> int:
    """Length of the longest suffix of `text` that occurs in `other`."""
    return next((n for n in range(len(text), 0, -1) if ends(other, text[-n:])), 0)


def random_text(alphabet: int, length: int) -> list[int]:
    return np.random.default_rng([alphabet, length]).integers(0, alphabet, length).tolist()


@pytest.mark.parametrize("alphabet", [1, 2, 3, 6])
def test_longest_match_and_its_most_frequent_follower_are_those_of_a_search(alphabet, monkeypatch):
    monkeypatch.setattr(automaton_module, "_COUNTED_LINKS", 1000)  # every occurrence counts
    text = random_text(alphabet, 120)
    automaton = SuffixAutomaton()
    for seen in range(1, len(text) + 1):
        automaton.extend(text[seen - 1])
        context = text[:seen]
        state = automaton.link[automaton.last]
        assert automaton.num_tokens == seen
        length = automaton.length[state]
        assert length == longest_suffix(context, context[:-1])
        if length:
            followers = [context[end] for end in ends(context[:-1], context[-length:])]
            most = max(Counter(followers).values())
            latest = next(token for token in reversed(followers) if followers.count(token) == most)
            assert automaton.predict(state, length)[0] == latest


def test_bounded_counts_still_give_a_follower_of_the_longest_match():
    text = random_text(2, 400)
    automaton = SuffixAutomaton()
    for seen, token in enumerate(text, 1):
        automaton.extend(token)
        state = automaton.link[automaton.last]
        length = automaton.length[state]
        if length:
            assert ends(text[:seen], [*text[seen - length : seen], automaton.predict(state, length)[0]])


@pytest.mark.parametrize("alphabet", [2, 4])
def test_cursor_finds_the_longest_suffix_in_another_text_that_grows(alphabet):
    other, text = random_text(alphabet, 90), random_text(alphabet, 91)
    automaton = SuffixAutomaton()
    cursor = Cursor(automaton)
    for seen, token in enumerate(text, 1):
        if seen % 4 == 0:
            for more in other[automaton.num_tokens : automaton.num_tokens + 5]:
                automaton.extend(more)
            cursor.settle()
        cursor.advance(token)
        known = other[: automaton.num_tokens]
        # What the other text gained since may hold a longer suffix than the one that is followed, never a shorter one.
        assert bool(cursor.state) == bool(cursor.length)
        assert cursor.length <= longest_suffix(text[:seen], known)
        if cursor.length:
            suffix = text[seen - cursor.length : seen]
            followers = {known[end] for end in ends(known, suffix) if end < len(known)}
            assert set(automaton.followers[cursor.state]) == followers


def test_cursor_in_a_text_that_stays_finds_all():
    other, text = random_text(3, 100), random_text(3, 101)
    automaton = SuffixAutomaton()
    for token in other:
        automaton.extend(token)
    cursor = Cursor(automaton)
    for seen, token in enumerate(text, 1):
        cursor.advance(token)
        assert cursor.length == longest_suffix(text[:seen], other)


def propose(context: list[int], limit: int = 5, drafter=None) -> Draft:
    drafter = drafter or make_drafter("suffix")
    drafter.start(0, context)
    (draft,) = drafter.propose([DraftRequest(0, context, limit, SAMPLER)])
    assert draft.probs is None and draft.parents is None
    assert len(draft.estimates or ()) == len(draft)
    return draft


@pytest.mark.parametrize(
    ("name", "context", "expected"),
    [
        ("one id", [1], []),
        ("nothing repeats", [1, 2, 3], []),
        ("followers of the match", [1, 2, 3, 9, 8, 1, 2], [3, 9, 8, 1, 2]),
        ("a loop has no end", [1, 2, 1, 2, 1], [2, 1, 2, 1, 2]),
        ("one id again and again", [7, 7], [7, 7, 7, 7, 7]),
        ("the latest of equally frequent followers", [1, 7, 1, 8, 1], [8, 1, 8, 1, 8]),
        ("the most frequent follower beats a later one", [1, 7, 1, 7, 1, 8, 3, 1], [7, 1, 8, 3, 1]),
        ("the longest match beats a more frequent follower", [2, 1, 8, 1, 7, 1, 7, 5, 2, 1], [8, 1, 7, 1, 7]),
        ("a match longer than any window", [*range(20), 30, *range(5, 20), 31, *range(20)], [30, 5, 6, 7, 8]),
    ],
)
def test_proposal(name, context, expected):
    assert list(propose(context).ids) == expected, name


def test_limit_shortens_the_proposal():
    assert propose([1, 2, 3, 4, 1], limit=1).ids == (2,)


def test_growing_context_gives_what_a_fresh_drafter_gives():
    """Whatever the numbers of tokens by which it grows; the drafts of requests do not mix."""
    generator = np.random.default_rng(4)
    drafter = make_drafter("suffix")
    contexts = [generator.integers(0, 3, 5).tolist() for _ in range(3)]
    for request_id, context in enumerate(contexts):
        drafter.start(request_id, context)
    for _ in range(60):
        drafts = drafter.propose([DraftRequest(i, context, 6, SAMPLER) for i, context in enumerate(contexts)])
        assert [draft.ids for draft in drafts] == [propose(list(context), 6).ids for context in contexts]
        for context in contexts:
            context.extend(generator.integers(0, 3, generator.integers(1, 5)).tolist())


# --- trees


def search(text: list[int], most: int) -> list[int]:
    """What followed the longest suffix of a text that occurred before, by how often, then what followed shorter ones."""
    found: list[int] = []
    for length in range(longest_suffix(text, text[:-1]), 0, -1):
        counts = Counter(text[end] for end in ends(text[:-1], text[-length:]))
        found += [token for token, _ in counts.most_common() if token not in found]
    return found[:most]


@pytest.mark.parametrize("alphabet", [2, 4, 8])
def test_branches_are_what_followed_the_longest_matches(alphabet, monkeypatch):
    """As sets: of equally frequent followers any may come first."""
    monkeypatch.setattr(automaton_module, "_COUNTED_LINKS", 1000)
    text = random_text(alphabet, 80)
    automaton = SuffixAutomaton()
    for seen, token in enumerate(text, 1):
        automaton.extend(token)
        state = automaton.link[automaton.last]
        length = automaton.length[state]
        found = automaton.branch(state, length, alphabet)
        assert {token for token, *_ in found} == set(search(text[:seen], alphabet))
        assert [kind >= automaton_module.NUM_KINDS for _, kind, *_ in found] == [i > 0 for i in range(len(found))]
        if found:
            assert found[0][:3] == automaton.predict(state, length)
            assert automaton.branch(state, length, 1) == found[:1]
        for follower, _, target, matched in found:
            assert ends(text[:seen], [*text[seen - matched + 1 : seen], follower])
            assert automaton.length[automaton.link[target]] < matched <= automaton.length[target]


def test_several_continuations_are_a_tree_where_trees_are_verified():
    drafter = make_drafter("suffix", {"branches": 2})
    context = [1, 7, 5, 1, 8, 6, 1, 7, 4, 1]
    drafter.start(0, context)
    requests = [DraftRequest(0, context, 12, SAMPLER, tree) for tree in (True, False)]
    tree, chain = (drafter.propose([each])[0] for each in requests)
    assert {(7,), (8,), (7, 5), (7, 4)} <= set(paths(tree)) and tree.is_tree
    assert tree.probabilities == sorted(tree.probabilities, reverse=True)
    assert chain == propose(context, 12)


# --- estimates


def test_estimates_follow_what_is_emitted_and_not_the_prompt():
    """Draft tokens after a match of one token that was seen once, of which 30 turn out right, or 30 wrong."""

    def estimate(emitted: list[int]) -> float:
        drafter = make_drafter("suffix")
        context = [1, 2, 3] * 30
        drafter.start(0, context)
        for token in emitted:
            drafter.propose([DraftRequest(0, context, 1, SAMPLER)])
            context.append(token)
        return propose([1, 9, 1], 1, drafter).estimates[0]

    prior = propose([1, 9, 1], 1).estimates[0]
    assert estimate([1]) == prior
    assert estimate([token for n in range(10, 40) for token in (n, 100 + n, n, 100 + n)]) > 0.8 > prior
    assert estimate([token for n in range(10, 40) for token in (n, 100 + n, n, 200 + n)]) < 0.1 < prior


@pytest.mark.parametrize("name", ["suffix", "ngram"])
def test_estimates_are_calibrated(name):
    """12 000 tokens out of 300, each followed by its own successor with probability 0.8, else by any token. Of the draft
    tokens at each depth, those before them being right: the share that is right is within 0.05 of the mean estimate."""
    generator = np.random.default_rng(7)
    successor = generator.permutation(300)
    text = [0]
    for _ in range(12000):
        text.append(int(successor[text[-1]] if generator.random() < 0.8 else generator.integers(300)))
    drafter = make_drafter(name)
    context = text[:1]
    drafter.start(0, context)
    depths: list[list[tuple[float, bool]]] = [[] for _ in range(5)]
    while len(context) < len(text) - 6:
        (draft,) = drafter.propose([DraftRequest(0, context, 5, SAMPLER)])
        for depth, (token, estimate) in enumerate(zip(draft.ids, draft.estimates or (), strict=True)):
            right = token == text[len(context)]
            depths[depth].append((estimate, right))
            context.append(text[len(context)])
            if not right:
                break
        else:
            context.append(text[len(context)])
    for pairs in depths:
        estimate, share = np.mean(pairs, axis=0)
        assert len(pairs) > 500 and share == pytest.approx(estimate, abs=0.05)


# --- history


def finish(drafter, request_id: int, prompt: list[int], emitted: list[int]) -> None:
    context = list(prompt)
    drafter.start(request_id, context)
    context += emitted
    drafter.stop(request_id)


def test_history_is_off_by_default_and_finds_what_others_emitted():
    for history_tokens, expected in ((0, ()), (100, (4, 5, 6))):
        drafter = make_drafter("suffix", {"history_tokens": history_tokens})
        finish(drafter, 7, [1, 2], [3, 4, 5, 6])
        assert propose([9, 3], 5, drafter).ids == expected  # and it ends where the text ended
    drafter = make_drafter("suffix", {"history_tokens": 100})
    finish(drafter, 7, [1, 2], [3, 4])
    assert propose([9, 1], 5, drafter).ids == ()  # prompts are not kept


@pytest.mark.parametrize("history_tokens", range(1, 6))
def test_history_that_can_hold_no_continuation_is_refused(history_tokens):
    """The least that is allowed holds one: [4, 5] and the end of the text."""
    with pytest.raises(
        QuasarError, match=f"history_tokens is {history_tokens}; allowed: 0, or an integer of at least 6"
    ):
        make_drafter("suffix", {"history_tokens": history_tokens})
    drafter = make_drafter("suffix", {"history_tokens": 6})
    finish(drafter, 7, [], [3, 4, 5])
    assert propose([9, 4], 5, drafter).ids == (5,)


def test_request_follows_a_history_that_grows_meanwhile():
    drafter = make_drafter("suffix", {"history_tokens": 60})
    context = [9, 3]
    drafter.start(0, context)
    assert drafter.propose([DraftRequest(0, context, 3, SAMPLER)])[0].ids == ()
    for number in range(20):  # the bound is passed several times
        finish(drafter, 1 + number, [], [3, 50 + number, 3, 50 + number, 60])
        assert drafter.propose([DraftRequest(0, context, 1, SAMPLER)])[0].ids == (50 + number,)
    context += [69, 3]
    assert drafter.propose([DraftRequest(0, context, 2, SAMPLER)])[0].ids == (69, 60)


def test_longer_match_in_the_history_beats_a_short_one_in_the_context():
    drafter = make_drafter("suffix", {"history_tokens": 100})
    finish(drafter, 7, [], [1, 2, 3, 4, 5, 6, 7])
    assert propose([4, 8, 1, 2, 3, 4], 2, drafter).ids == (5, 6)
    assert propose([1, 2, 3, 4, 8, 9, 4], 2, drafter).ids == (8, 9)


@pytest.mark.parametrize("length", [1, 30, 99, 100, 101, 1000])
def test_history_holds_its_bound(length):
    drafter = make_drafter("suffix", {"history_tokens": 200})
    for number in range(2000 // length + 2):
        finish(drafter, number, [0], random_text(50, length + number % 2))
        kept = [automaton.num_tokens for automaton in drafter._history.automata]
        assert sum(kept) <= 200 and len(kept) <= 2
    assert sum(kept) >= min(100, length)


def test_a_token_of_history_takes_about_a_kilobyte():
    tracemalloc.start()
    drafter = make_drafter("suffix", {"history_tokens": 20_000})
    finish(drafter, 0, [0], random_text(1000, 10_000))
    used = tracemalloc.get_traced_memory()[0] / sum(each.num_tokens for each in drafter._history.automata)
    tracemalloc.stop()
    assert used < 1200
