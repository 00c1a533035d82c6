"""The suffix drafter: text that repeats goes on as it mostly did, after the longest match there is.

A suffix automaton of each request's prompt and output finds, at every step, the longest suffix of the context that
occurred before, however long, and what followed it most often. How often such continuations were right so far gives each
draft token an estimate of its acceptance. Deterministic, so drafts carry no probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quasar_trt.drafters.automaton import NUM_EVIDENCES, NUM_KINDS, Cursor, SuffixAutomaton
from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest, check_num_speculative_tokens
from quasar_trt.drafters.estimates import AcceptanceEstimates
from quasar_trt.drafters.tree import likeliest_tree
from quasar_trt.errors import QuasarError, named_options

_END_OF_TEXT = -1
_LONGEST_HISTORY_MATCH = 32  # tokens; a longer match would not be a better one
_LEAST_HISTORY = 6  # tokens; half of it holds a token, the one that followed it and the end of the text

# The share of draft tokens that were right in answers of a small chat model, greedy and sampled, to questions of many
# kinds. Rows: length of the match; columns: what followed before (see automaton.py).
_PRIORS = (
    (0.20, 0.45, 0.60, 0.30, 0.10),
    (0.45, 0.60, 0.85, 0.65, 0.25),
    (0.55, 0.75, 0.90, 0.45, 0.25),
    (0.65, 0.80, 0.90, 0.45, 0.30),
    (0.75, 0.85, 0.95, 0.45, 0.30),
    (0.90, 0.95, 0.95, 0.50, 0.50),
)
# The same of continuations that are not the first choice; columns: how often they followed.
_OTHER_PRIORS = (0.01, 0.03, 0.06, 0.05, 0.05), *[(0.08,) * NUM_EVIDENCES] * (len(_PRIORS) - 1)


@named_options("suffix drafter option")
@dataclass(frozen=True)
class SuffixOptions:
    """num_speculative_tokens: the most draft tokens per request and step; None for as many as the engine allows.

    branches: the most continuations of one place that are proposed; drafts are chains where it is 1, and where the engine
        verifies no trees.
    history_tokens: the most emitted tokens of finished requests that are kept, in which later requests find matches too;
        0 for none, otherwise at least 6: fewer hold no continuation. Each takes about a kilobyte of memory.
    """

    num_speculative_tokens: int | None = None
    branches: int = 1
    history_tokens: int = 0

    def __post_init__(self):
        check_num_speculative_tokens(self.num_speculative_tokens)
        if type(self.branches) is not int or self.branches < 1:
            raise QuasarError(f"branches is {self.branches!r}; allowed: an integer of at least 1")
        tokens = self.history_tokens
        if type(tokens) is not int or not (tokens == 0 or tokens >= _LEAST_HISTORY):
            raise QuasarError(f"history_tokens is {tokens!r}; allowed: 0, or an integer of at least {_LEAST_HISTORY}")


class History:
    """What finished requests emitted, in at most two automata: when the newer is half of the bound, the older is dropped.

    automata: newest first; generation: how often they have changed places.
    """

    def __init__(self, limit: int):
        self.automata: list[SuffixAutomaton] = []
        self.generation = 0
        self._half = limit // 2

    def add(self, tokens: Sequence[int]) -> None:
        tokens = tokens[max(len(tokens) + 1 - self._half, 0) :]  # the end of the text counts as a token
        if not tokens:
            return
        if not self.automata or self.automata[0].num_tokens + len(tokens) + 1 > self._half:
            self.automata = [SuffixAutomaton(), *self.automata[:1]]
            self.generation += 1
        for token in (*tokens, _END_OF_TEXT):
            self.automata[0].extend(token)


class _Text:
    """The automaton of one request's context, and where the context is in those of the history."""

    def __init__(self, context: Sequence[int]):
        self.automaton = SuffixAutomaton()
        self.num_prompt_tokens = len(context)
        self.context = context
        self.cursors: list[Cursor] = []
        self._generation = 0

    def catch_up(self, history: History, estimates: AcceptanceEstimates, branches: int) -> None:
        """Takes in what the context has gained, and learns from those of its tokens that were emitted."""
        if self._generation != history.generation:
            self._generation = history.generation
            self.cursors = [Cursor(automaton) for automaton in history.automata]
            num_seen = self.automaton.num_tokens
            for token in self.context[max(num_seen - _LONGEST_HISTORY_MATCH, 0) : num_seen]:
                for cursor in self.cursors:
                    cursor.advance(token)
        for cursor in self.cursors:
            cursor.settle()
        for position in range(self.automaton.num_tokens, len(self.context)):
            token = self.context[position]
            if position >= self.num_prompt_tokens:
                for automaton, state, length, first_kind in self.matches():
                    one = branches == 1
                    found = [automaton.predict(state, length)] if one else automaton.branch(state, length, branches)
                    for predicted, kind, *_ in found:
                        estimates.count(first_kind + kind, predicted == token)
            self.automaton.extend(token)
            for cursor in self.cursors:
                cursor.advance(token)

    def matches(self, ahead: Sequence[int] = ()) -> Iterator[tuple[SuffixAutomaton, int, int, int]]:
        """The longest match in the context itself and in the history, for what follows the context and the ids `ahead` of it:
        (automaton, state, length, first of its kinds)."""
        state = self.automaton.link[self.automaton.last]
        places = [(self.automaton, state, self.automaton.length[state], 0)]
        places += [(cursor.automaton, cursor.state, cursor.length, 2 * NUM_KINDS) for cursor in self.cursors]
        for automaton, begin, num_matched, first_kind in places:
            state, length = automaton.advance(begin, num_matched, ahead)
            if state > 0:
                yield automaton, state, length, first_kind


class SuffixDrafter(Drafter):
    """The most frequent continuation of the longest match in each request's own context, or in what others emitted."""

    def __init__(self, options: SuffixOptions):
        self.options = options
        self.num_speculative_tokens = options.num_speculative_tokens
        priors = [prior for row in (*_PRIORS, *_OTHER_PRIORS) for prior in row]
        self._estimates = AcceptanceEstimates(priors * 2)  # matches in the context, then those in the history
        self._history = History(options.history_tokens)
        self._texts: dict[int, _Text] = {}

    def start(self, request_id: int, context: Sequence[int]) -> None:
        self._texts[request_id] = _Text(context)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose_one(request) for request in batch]

    def _propose_one(self, request: DraftRequest) -> Draft:
        text = self._texts[request.request_id]
        text.catch_up(self._history, self._estimates, self.options.branches)
        best, most = NO_DRAFT, 0.0
        draft_of = self._tree if self.options.branches > 1 and request.tree else self._chain
        for automaton, state, length, first_kind in text.matches(request.ahead):
            draft = draft_of(automaton, state, length, first_kind, request.limit)
            num_expected_tokens = sum(draft.probabilities)
            if num_expected_tokens > most:
                best, most = draft, num_expected_tokens
        return best

    def _chain(self, automaton: SuffixAutomaton, state: int, length: int, first_kind: int, limit: int) -> Draft:
        tokens, kinds = automaton.follow(state, length, limit)
        return Draft(tuple(tokens), estimates=tuple([self._estimates.of[first_kind + kind] for kind in kinds]))

    def _tree(self, automaton: SuffixAutomaton, state: int, length: int, first_kind: int, limit: int) -> Draft:
        estimates = self._estimates.of

        def continuations(match: tuple[int, int]):
            for token, kind, *after in automaton.branch(*match, self.options.branches):
                yield token, estimates[first_kind + kind], after

        return likeliest_tree((state, length), continuations, limit)

    def stop(self, request_id: int) -> None:
        text = self._texts.pop(request_id)
        self._history.add(text.context[text.num_prompt_tokens :])
