"""A suffix automaton over a text that grows token by token (Blumer et al., 1985, "The smallest automaton recognizing the
subwords of a text"), with the most frequent follower of each substring.

Everything is kept in flat lists indexed by state: a step of drafting must not show beside a pass of the verifier.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

_COUNTED_LINKS = 8  # states per token whose followers are counted, longest substrings first

# Kinds of followers, for estimates of their acceptance: classes of the match's length, the last one open, by what followed
# it before: always the same token, or this one more than half of the times, or less.
_LENGTHS = (0, 0, 1, 2, 3, 3, 4, 4, 4, 5)
_ONCE, _TWICE, _OFTEN, _MOSTLY, _SOMETIMES = range(5)
NUM_EVIDENCES = 5
NUM_KINDS = (_LENGTHS[-1] + 1) * NUM_EVIDENCES


class SuffixAutomaton:
    """State 0 is the empty string; each other state stands for the substrings that end at the same places of the text.

    followers: [state] -> {token: the state after it}.
    link: [state] -> the state of the longest suffix that also ends elsewhere; -1 for state 0.
    length: [state] -> tokens in its longest substring.
    last: the state of the whole text; `link[last]` is that of the longest suffix that occurred before.
    """

    def __init__(self):
        self.followers: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.last = 0
        self._best = [-1]  # [state] -> its most frequent follower, the latest of equals
        # [state] -> times that its substrings were seen. The suffixes of a text that repeats itself may be as many as its
        # tokens, so only the longest are counted each time: the counts of short ones may be too low, never too high.
        self._count = [0]

    @property
    def num_tokens(self) -> int:
        return self.length[self.last]

    def extend(self, token: int) -> None:
        """Appends one token, in amortised constant time."""
        followers, link, length, best, count = self.followers, self.link, self.length, self._best, self._count
        state, new = self.last, len(link)
        self._add_state({}, 0, length[state] + 1, -1, 1)
        self.last = new
        while state != -1 and token not in followers[state]:
            after = followers[state]
            if not after or count[after[best[state]]] == 1:
                best[state] = token
            after[token] = new
            state = link[state]
        if state == -1:
            return
        target = followers[state][token]
        if length[state] + 1 < length[target]:  # only the shorter substrings of `target` end here too: they part
            shorter = len(link)
            self._add_state(followers[target].copy(), link[target], length[state] + 1, best[target], count[target])
            link[target] = shorter
            ancestor = state
            while ancestor != -1 and followers[ancestor].get(token) == target:
                followers[ancestor][token] = shorter
                ancestor = link[ancestor]
            target = shorter
        link[new] = target
        counted = 0
        for _ in range(_COUNTED_LINKS):
            if state == -1:
                break
            after = followers[state]
            target = after[token]
            if target != counted:  # several states lead to one
                count[target] += 1
                counted = target
            if count[target] >= count[after[best[state]]]:
                best[state] = token
            state = link[state]

    def _add_state(self, followers: dict[int, int], link: int, length: int, best: int, count: int) -> None:
        self.followers.append(followers)
        self.link.append(link)
        self.length.append(length)
        self._best.append(best)
        self._count.append(count)

    def predict(self, state: int, length: int) -> tuple[int, int, int]:
        """The most frequent follower of a state's substring of `length` tokens: (token, kind, the state after it)."""
        after = self.followers[state]
        token = self._best[state]
        target = after[token]
        count = self._count[target]
        if len(after) == 1:
            evidence = _ONCE if count == 1 else _TWICE if count == 2 else _OFTEN
        else:
            unfollowed = state == self.link[self.last]  # it is at the end of the text too
            num_followed = self._count[state] - unfollowed
            evidence = _MOSTLY if 2 * count > num_followed else _SOMETIMES
        return token, _LENGTHS[length if length < 9 else 9] * NUM_EVIDENCES + evidence, target

    def follow(self, state: int, length: int, limit: int) -> tuple[list[int], list[int]]:
        """What followed a state's substring of `length` tokens before, up to `limit` tokens: (tokens, their kinds).

        At the end of the text it goes on after the longest suffix that occurred before, so loops have no end.
        """
        tokens, kinds = [], []
        while state > 0 and len(tokens) < limit:
            if self.followers[state]:
                token, kind, state = self.predict(state, length)
                if token < 0:  # the end of a text
                    break
                tokens.append(token)
                kinds.append(kind)
                length += 1
            else:
                state = self.link[state]
                length = min(length, self.length[state])
        return tokens, kinds

    def advance(self, state: int, length: int, tokens: Iterable[int]) -> tuple[int, int]:
        """The longest suffix that occurs here of a text whose longest was a state's substring of `length` tokens, once
        `tokens` have come behind it: (state, length)."""
        for token in tokens:
            while state > 0 and token not in self.followers[state]:
                state = self.link[state]
                length = self.length[state]
            target = self.followers[state].get(token)
            if target is not None:
                state = target
                length += 1
        return state, length

    def branch(self, state: int, length: int, most: int) -> list[tuple[int, int, int, int]]:
        """What followed a state's substring of `length` tokens before, most frequent first, then what followed its suffixes, up
        to `most` tokens: (token, kind, the state after it, the length of its match).

        The first one's kind is that of `predict`; those of others are `NUM_KINDS` more, classes of the length by how often
        the token followed.
        """
        found: dict[int, tuple[int, int, int, int]] = {}
        count = self._count
        while state > 0 and len(found) < most:
            after = self.followers[state]
            if not found and self._best[state] >= 0:
                token, kind, target = self.predict(state, length)
                found[token] = token, kind, target, length + 1
            kind = NUM_KINDS + _LENGTHS[length if length < 9 else 9] * NUM_EVIDENCES
            for token in nlargest(most, after, key=lambda token, after=after: count[after[token]]):
                if token >= 0 and token not in found and len(found) < most:
                    target = after[token]
                    evidence = min(10 * count[target] // count[state], NUM_EVIDENCES - 1)
                    found[token] = token, kind + evidence, target, length + 1
            state = self.link[state]
            length = min(length, self.length[state])
        return list(found.values())


class Cursor:
    """Follows a text through the automaton of others: `state` and `length` are those of its longest suffix there."""

    def __init__(self, automaton: SuffixAutomaton):
        self.automaton = automaton
        self.state = 0
        self.length = 0

    def settle(self) -> None:
        """To be called after the automaton has grown: short substrings may have moved to another state."""
        automaton = self.automaton
        while self.state and self.length <= automaton.length[automaton.link[self.state]]:
            self.state = automaton.link[self.state]

    def advance(self, token: int) -> None:
        self.state, self.length = self.automaton.advance(self.state, self.length, (token,))
