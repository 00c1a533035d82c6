"""The drafter interface: who proposes tokens for the verifier to score.

Words: a drafter *proposes* draft tokens; the verifier scores them all in one pass; the accepted ones are a prefix (of a
chain) or a path (of a tree). p is always the target distribution, q the drafter's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from quasar_trt.errors import QuasarError

if TYPE_CHECKING:
    from quasar_trt.engines.base import Engine
    from quasar_trt.sampling import Sampler
    from quasar_trt.step_cost import StepCost
    from quasar_trt.stopping import StopChecker


@dataclass(frozen=True)
class Draft:
    """Draft tokens for one request.

    ids: draft token ids; of a tree parents before children, and likelier paths before others, so that its first tokens
        are its best subtree of their number.
    parents: index of each token's parent within `ids`, -1 for children of the last committed token; None means a chain.
    probs: [len(ids), vocab] float32, the distribution q each token was drawn from, after the request's own temperature
        and filters; None when the drafter is deterministic (q is one-hot). The q of a sibling may depend on the siblings
        before it: it is q without them where they are drawn without replacement.
    estimates: for each token, the probability that it is accepted given that its parent was; None when the drafter cannot
        tell, and then the draft counts as certain. With probs they must not depend on which tokens were drawn: what is
        verified is chosen by them, and a choice that favours some tokens would bend the output's distribution.
    """

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probs: np.ndarray | None = None
    estimates: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_tree(self) -> bool:
        """Whether it branches; a chain may have parents too."""
        return self.parents is not None and self.parents != tuple(range(-1, len(self.ids) - 1))

    @property
    def probabilities(self) -> list[float]:
        """For each token, the probability that it and all before it on its path are accepted, by the estimates."""
        estimates = self.estimates or (1.0,) * len(self.ids)
        if self.parents is None:
            return list(accumulate(estimates, mul))
        found: list[float] = []
        for parent, estimate in zip(self.parents, estimates, strict=True):
            found.append(estimate if parent < 0 else found[parent] * estimate)
        return found

    def children(self, index: int) -> Sequence[int]:
        """Indices of the tokens whose parent is the one at `index`; -1 is the last committed token."""
        if self.parents is None:
            return range(index + 1, min(index + 2, len(self.ids)))
        return [child for child, parent in enumerate(self.parents) if parent == index]

    def first(self, count: int) -> Draft:
        """The first `count` tokens."""
        if count == len(self.ids):
            return self
        parents = None if self.parents is None else self.parents[:count]
        probs = None if self.probs is None else self.probs[:count]
        estimates = None if self.estimates is None else self.estimates[:count]
        return Draft(self.ids[:count], parents, probs, estimates)

    def after(self, ids: Sequence[int]) -> Draft:
        """The ids and parents of a chain of `ids` that goes on with this draft."""
        count = len(ids)
        parents = None
        if self.parents is not None:
            parents = (*range(-1, count - 1), *[parent + count for parent in self.parents])
        return Draft((*ids, *self.ids), parents)


NO_DRAFT = Draft()


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter sees of one request when asked to propose.

    request_id: the id given to `start`.
    context: prompt and emitted ids so far; the runner appends to it, a drafter only reads it.
    limit: the most draft tokens this request can use now, >= 1.
    sampler: the request's own parameters and noise. A drafter with probabilities gets q from
        `sampler.target(its logits, the ids drafted before them)` and draws with `sampler.uniform(position, DRAFT)`, a
        stream of its own: draws that share their noise with acceptance would bend the output's distribution. Siblings
        after the first have streams of their own, `numbered(DRAFT, 1)` and so on; so should draws for one position in drafts
        that begin at different ones, where earlier draws decide how much is drafted later.
    tree: whether the draft may branch; `limit` counts all of its tokens.
    stop: decides which tokens end the request; a drafter asks a copy of it, `stop.ahead()`. None where nothing does.
    ahead: ids that another drafter supposes to follow the context; the draft goes on after them.
    """

    request_id: int
    context: Sequence[int]
    limit: int
    sampler: Sampler
    tree: bool = False
    stop: StopChecker | None = None
    ahead: Sequence[int] = ()


def check_num_speculative_tokens(value: object) -> None:
    """Raises QuasarError unless `value` can be the option of that name, which every drafter has."""
    if value is not None and (type(value) is not int or value < 1):
        raise QuasarError(f"num_speculative_tokens is {value!r}; allowed: an integer of at least 1")


class Drafter(ABC):
    """Proposes draft tokens for the requests of one runner. Its state lives between `start` and `stop` of a request.

    reads_logits: whether `read` is to be called.
    hidden_layers: the places whose hidden states `read_states` is to be called with, as `Engine.keep_hidden_states` has them.
    draws: whether drafts have probabilities. They are then verified whole, so the limits given for one pass add up to no more
        than it has rows for.
    seconds: what the drafts proposed last have cost, where that is to count when their lengths are chosen.
    """

    reads_logits = False
    hidden_layers: tuple[int, ...] = ()
    draws = False
    seconds = 0.0
    num_speculative_tokens: (
        int | None
    )  # the most draft tokens that are asked of it per request; None for the engine's limit

    def attach(self, engine: Engine, step_cost: StepCost | None, tokenizer: object | None) -> None:  # noqa: B027 (optional hook)
        """The verifier, before anything else: its engine, what its passes cost, and its tokenizer or the directory of that.

        Raises QuasarError when the drafter does not fit it.
        """

    def start(self, request_id: int, context: Sequence[int]) -> None:  # noqa: B027
        """A request begins; `context` is its growing list of prompt and emitted ids, shared, never copied."""

    @abstractmethod
    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per entry of `batch`, each of at most `limit` tokens, possibly empty.

        The runner may verify fewer tokens of a draft, its first ones, or none. After a pass that failed a request is asked again, without
        `observe` for the draft that was lost.
        """

    def read(self, request_id: int, draft: Draft, logits: np.ndarray) -> None:  # noqa: B027
        """What the verifier computed for the request, before it is observed.

        draft: the part that was verified; logits: [1 + len(draft), vocab] float32, valid only during the call. Row 0 belongs
        to the last id of the request's context, row i to draft token i - 1, accepted or not.
        """

    def read_states(self, request_id: int, position: int, states: np.ndarray) -> None:  # noqa: B027
        """The hidden states of the tokens that have entered the request's cache, before the request is observed.

        position: of the first of these tokens in the text; below that of tokens read before where the cache was lost, above 0 at first
        where it was shared. states: [tokens, places of `hidden_layers`, hidden_size] float32.
        """

    def observe(self, request_id: int, emitted: Sequence[int], num_accepted_tokens: int) -> None:  # noqa: B027
        """The verifier's answer to what it scored of the last draft: the ids emitted, of which the first `num_accepted_tokens` were drafted."""

    def pause(self, request_id: int) -> None:  # noqa: B027
        """The request has lost its cache and waits; memory that is held for it can go until it is asked about again."""

    def stop(self, request_id: int) -> None:  # noqa: B027
        """The request has ended; its state can go."""

    def forget_prefixes(self) -> None:  # noqa: B027
        """Frees what ended requests left in an engine's cache for later ones that begin alike."""
