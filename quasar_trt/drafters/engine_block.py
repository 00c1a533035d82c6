"""One request's draft in the making, and the sampling of what a drafting engine writes into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quasar_trt.drafters.agreement import Agreement
from quasar_trt.drafters.base import NO_DRAFT, Draft, DraftRequest
from quasar_trt.drafters.draft_sequences import DraftSequence
from quasar_trt.drafters.vocabulary import SameVocabulary
from quasar_trt.engines.base import Acceptance
from quasar_trt.errors import QuasarError
from quasar_trt.rejection import accept
from quasar_trt.sampling import DRAFT, numbered
from quasar_trt.stopping import StopChecker


@dataclass
class Block:
    """What the drafting engine has written for one request, and how its own drafter would go on.

    sequence: None where the engine holds none; then it writes nothing.
    text: the context and the block as the engine reads them.
    ids: the block, as the verifier reads it. kinds: of these ids, for estimates of their acceptance. probs: the distribution
        [vocab] float32 that each was drawn from, where they were drawn.
    tail: what the drafter proposes behind the block. num_tested: its tokens that the engine is to verify in its next pass.
    goes_on: whether the engine may write more.
    """

    request: DraftRequest
    sequence: DraftSequence | None
    text: list[int]
    vocabulary: SameVocabulary
    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    probs: list[np.ndarray] = field(default_factory=list)
    tail: Draft = NO_DRAFT
    num_tested: int = 0
    goes_on: bool = True
    _stop: StopChecker | None = None

    @property
    def room(self) -> int:
        """Draft tokens that are still allowed."""
        return self.request.limit - len(self.ids)

    @property
    def num_pending(self) -> int:
        """Ids that the engine has not read."""
        return len(self.text) - len(self.sequence.cached)

    def whole_draft(self, agreement: Agreement) -> Draft:
        """The block and its tail, for the verifier.

        A block that was drawn counts as certain: it is to be verified whole, because leaving out tokens for what they are
        would bend the output's distribution.
        """
        ids = (*self.ids, *self.tail.ids)
        if not self.probs:
            return Draft(ids, estimates=(*self.estimates(agreement), *self.tail_estimates))
        probs = np.zeros((len(ids), len(self.probs[0])), np.float32)
        probs[: len(self.ids)] = self.probs
        probs[range(len(self.ids), len(ids)), self.tail.ids] = 1.0
        return Draft(ids, probs=probs, estimates=((1.0,) * len(self.ids) + tuple(self.tail_estimates)))

    def estimates(self, agreement: Agreement) -> list[float]:
        return [agreement.of[kind] for kind in self.kinds]

    @property
    def tail_estimates(self) -> tuple[float, ...]:
        return self.tail.estimates or (1.0,) * len(self.tail)

    @property
    def testable(self) -> Draft:
        """What the engine can verify of the tail, as it reads it."""
        return dataclasses.replace(self.tail, ids=tuple(self.vocabulary.ids(self.tail.ids)))

    def accept(self, logits: np.ndarray, draft: Draft) -> Acceptance:
        """Acceptance of such a draft by the engine's rows. A row that is no distribution ends the block."""
        try:
            return accept(logits, draft, _Writer(self), len(self.request.context) + len(self.ids), self._finishes)
        except QuasarError:
            self.goes_on = False
            return Acceptance((), 0)

    def _finishes(self, token: int) -> bool:
        """Whether the request would end with this token of the block; then nothing need follow it."""
        if self._stop is None and self.request.stop is not None:
            self._stop = self.request.stop.ahead()
        if self._stop is not None and self._stop.emit(token):
            self.goes_on = False
        return not self.goes_on

    def extend(self, chunk: Sequence[int], draft: Draft, acceptance: Acceptance | None, max_seq_len: int) -> None:
        """The engine has read a chunk of the pending ids; where they were the last of them, it has written too."""
        self.sequence.cached += chunk
        if acceptance is None:
            return
        self.sequence.cached += draft.ids[: acceptance.num_accepted_tokens]
        self._add(acceptance.emitted)
        self.tail = NO_DRAFT
        self.goes_on = self.goes_on and self.room > 0 and len(self.text) <= max_seq_len

    def _add(self, emitted: Sequence[int]) -> None:
        """The engine has written more."""
        self.ids += emitted
        self.text += self.vocabulary.ids(emitted)


class _Writer:
    """Stands as the request's sampler while the engine accepts what its own drafter said."""

    def __init__(self, block: Block):
        self._block = block
        self.greedy = block.request.sampler.greedy

    def sample(self, logits: np.ndarray, position: int, drafted: Sequence[int]) -> int:
        """The engine's most probable token, or one drawn from its own target distribution q.

        Which kind a drawn token is of must depend on q alone: kinds decide how long the block becomes. What was drawn for this
        position in an earlier block and left behind a rejection may have decided it too, so the noise is that of this block.
        """
        block, sampler = self._block, self._block.request.sampler
        row, before = block.vocabulary.row(logits), [*block.ids, *drafted]
        if self.greedy:
            token = sampler.sample(row, position, before)
            block.kinds.append(Agreement.kind_of_choice(row, token))
            return token
        q = sampler.target(row, before)
        token = q.pick(sampler.uniform(position, numbered(DRAFT, len(before))))
        block.probs.append(q.dense(len(row)))
        block.kinds.append(Agreement.kind_of_draw(block.probs[-1]))
        return token
