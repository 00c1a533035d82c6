"""Acceptance: which draft tokens are kept, so that the output is distributed exactly as without drafting.

Words
    draft token   proposed by the drafter.
    target p      the model's distribution of a row, after the request's own parameters (docs/sampling.md).
    draft q       the distribution a draft token was drawn from, after the same transforms.
    accepted      a draft token that is kept; accepted tokens are a prefix of a chain, a path from the root of a tree.
    recovered     the token emitted in place of the first draft token that is not kept.
    bonus         the token sampled from the last row when the whole draft, or a whole path, was accepted.
    emitted       accepted + one (recovered or bonus).

Drafts without probabilities: sample matching. The row's token x is sampled from p with its keyed noise, exactly as plain
decoding would; draft token d is accepted iff x = d, and x is emitted either way. For a one-hot q this is rejection
sampling: d is kept with probability p(d), otherwise x follows p without d. The ids therefore do not depend on the draft.
In a tree the child that equals x, if there is one, is accepted, and its row comes next.

Drafts with probabilities: the ratio test (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318,
algorithm 2). Draft token d ~ q is accepted with probability min(1, p(d) / q(d)); otherwise the recovered token is drawn
from the residual max(0, p - q) / sum(max(0, p - q)). The emitted token then follows p:
    q(x) min(1, p(x) / q(x)) + (1 - sum_y min(p(y), q(y))) residual(x) = min(p(x), q(x)) + max(0, p(x) - q(x)) = p(x).
The test is written u q(d) < p(d) with u in [0, 1), both probabilities rounded to float32: a token of probability 0 never
passes, not even with u = 0; one with p(d) = q(d) > 0 always does; so after a rejection p(d) < q(d) and the residual holds
none of d. Where rounding alone makes q exceed p and no residual is left over, p itself stands in for it: its draw may be d
again, which is then kept. At temperature 0 p is one-hot and both rules emit the argmax.

In a tree the siblings are tested in turn, each against what the one before it left (Miao et al., SpecInfer, arXiv
2305.09781, for siblings that are drawn independently; Jeon et al., arXiv 2402.14160, and Chen et al., Sequoia, arXiv
2402.12374, without replacement). With p_1 = p, sibling d_i ~ q_i is accepted with probability min(1, p_i(d_i) / q_i(d_i));
otherwise p_(i+1) = max(0, p_i - q_i), normalised, is the target of the next, and after the last one the recovered token is
drawn from it. q_i may depend on d_1 .. d_(i-1): it is what d_i was drawn from given those, the same q for all, or q without
them, renormalised. By the equation above, from the last sibling to the first, what is emitted once i - 1 siblings were
rejected follows p_i; so what is emitted at all follows p. Each test has noise of its own.

Each row is treated as if the draft tokens before it on its path were already emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance
from quasar_trt.errors import QuasarError
from quasar_trt.sampling import ACCEPT, SAMPLE, Sampler, Target, numbered


def accept(
    logits: np.ndarray, draft: Draft, sampler: Sampler, position: int, finishes: Callable[[int], bool]
) -> Acceptance:
    """Accepts a prefix of a chain, or a path of a tree, and emits one token more.

    logits: [1 + len(draft), vocab] float32; row 0 belongs to the last committed token, row i to draft token i - 1.
    position: of the first emitted token in the sequence; keys the noise.
    finishes: called with each emitted token in turn; whether the request ends with it. Nothing is emitted after such a
        token: when it is a draft token, there is no recovered or bonus token.

    Rows off the accepted path are not looked at. Raises QuasarError when row 0 has no finite maximum. A later row without
    one ends the step with the tokens before it, the last of which counts as not drafted: the next pass brings it again and
    meets that row as its row 0, as plain decoding does.
    """
    emitted: list[int] = []
    path: list[int] = []
    last: int | None = -1  # draft token on the path
    while last is not None:
        row, siblings = logits[last + 1], draft.children(last)
        try:
            if draft.probs is None or sampler.greedy or not siblings:
                token = sampler.sample(row, position + len(emitted), emitted)
            else:
                token = _ratio_tests(row, draft, siblings, sampler, position + len(emitted), emitted)
        except QuasarError:
            if not emitted:
                raise
            path.pop()
            break
        emitted.append(token)
        last = next((index for index in siblings if draft.ids[index] == token), None)
        if last is not None:
            path.append(last)
        if finishes(token):
            break
    return Acceptance(tuple(emitted), len(path), None if draft.parents is None else tuple(path))


def _ratio_tests(
    row: np.ndarray, draft: Draft, siblings: Sequence[int], sampler: Sampler, position: int, before: list[int]
) -> int:
    """The first of the siblings that passes, else the recovered token.

    row: logits [vocab] float32; before: the accepted draft tokens before it.
    """
    p = sampler.target(row, before)
    for number, index in enumerate(siblings):
        token, q = draft.ids[index], draft.probs[index]
        if sampler.uniform(position, numbered(ACCEPT, number)) * float(q[token]) < p.probability(token):
            return token
        residual = Target(np.maximum(p.dense(len(row)) - q, np.float32(0)))
        if residual.total > 0.0:
            p = residual
    return p.pick(sampler.uniform(position, SAMPLE))
