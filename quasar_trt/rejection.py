"""Acceptance: which draft tokens are kept, so that the output is distributed exactly as without drafting.

Words
    draft token   proposed by the drafter.
    target p      the model's distribution of a row, after the request's own parameters (docs/sampling.md).
    draft q       the distribution a draft token was drawn from, after the same transforms.
    accepted      a draft token that is kept; accepted tokens are a prefix of the draft.
    recovered     the token emitted in place of the first draft token that is not kept.
    bonus         the token sampled from the last row when the whole draft was accepted.
    emitted       accepted + one (recovered or bonus).

Drafts without probabilities: sample matching. The row's token x is sampled from p with its keyed noise, exactly as plain
decoding would; draft token d is accepted iff x = d, and x is emitted either way. For a one-hot q this is rejection
sampling: d is kept with probability p(d), otherwise x follows p without d. The ids therefore do not depend on the draft.

Drafts with probabilities: the ratio test (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318,
algorithm 2). Draft token d ~ q is accepted with probability min(1, p(d) / q(d)); otherwise the recovered token is drawn
from the residual max(0, p - q) / sum(max(0, p - q)). The emitted token then follows p:
    q(x) min(1, p(x) / q(x)) + (1 - sum_y min(p(y), q(y))) residual(x) = min(p(x), q(x)) + max(0, p(x) - q(x)) = p(x).
The test is written u q(d) < p(d) with u in [0, 1), both probabilities rounded to float32: a token of probability 0 never
passes, not even with u = 0; one with p(d) = q(d) > 0 always does; so after a rejection p(d) < q(d) and the residual holds
none of d. Where rounding alone makes q exceed p and no residual is left over, p itself stands in for it: its draw may be d
again, which is then kept. At temperature 0 p is one-hot and both rules emit the argmax.

Each row is treated as if the drafts before it were already emitted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance
from quasar_trt.errors import QuasarError
from quasar_trt.sampling import ACCEPT, SAMPLE, Sampler, Target


def accept(
    logits: np.ndarray, draft: Draft, sampler: Sampler, position: int, finishes: Callable[[int], bool]
) -> Acceptance:
    """Accepts a prefix of one draft (a chain) and emits one token more.

    logits: [1 + len(draft), vocab] float32; row 0 belongs to the last committed token, row i to draft token i - 1.
    position: of the first emitted token in the sequence; keys the noise.
    finishes: called with each emitted token in turn; whether the request ends with it. Nothing is emitted after such a
        token: when it is a draft token, there is no recovered or bonus token.

    Rows after the first rejection are not looked at. Raises QuasarError when row 0 has no finite maximum. A later row
    without one ends the step with the tokens before it, the last of which counts as not drafted: the next pass brings it
    again and meets that row as its row 0, as plain decoding does.
    """
    emitted: list[int] = []
    for row, drafted in enumerate((*draft.ids, None)):  # no token is drafted for the last row: it gives the bonus
        q = None if drafted is None or draft.probs is None or sampler.greedy else draft.probs[row]
        try:
            if q is None:
                token = sampler.sample(logits[row], position + row, emitted)
            else:
                token = _ratio_test(logits[row], drafted, q, sampler, position + row, emitted)
        except QuasarError:
            if row == 0:
                raise
            break
        emitted.append(token)
        if finishes(token):
            return Acceptance(tuple(emitted), row + (token == drafted))
        if token != drafted:
            break
    return Acceptance(tuple(emitted), len(emitted) - 1)


def _ratio_test(
    logits: np.ndarray, drafted: int, q: np.ndarray, sampler: Sampler, position: int, before: list[int]
) -> int:
    """The drafted token when it passes, else the recovered token.

    logits, q: [vocab] float32; before: the accepted draft tokens before the row.
    """
    p = sampler.target(logits, before)
    if sampler.uniform(position, ACCEPT) * float(q[drafted]) < p.probability(drafted):
        return drafted
    recovered = Target(np.maximum(p.dense(len(logits)) - q, np.float32(0)))
    return (recovered if recovered.total > 0.0 else p).pick(sampler.uniform(position, SAMPLE))
