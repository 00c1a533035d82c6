"""How long blocks of a drafting engine are worth being made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from quasar_trt.drafters.agreement import Agreement
from quasar_trt.drafters.drafting_passes import DraftingPasses
from quasar_trt.drafters.engine_block import Block


class BlockLengths(DraftingPasses):
    """Decides before each pass of the drafting engine whether that pass is worth its time.

    Behind its block every draft goes on with its tail, the tokens that cost nothing but the verifier's rows; a tail as good as
    this one is expected behind a longer block too.
    """

    def pays(self, blocks: Sequence[Block], agreement: Agreement) -> bool:
        """Whether one more drafting pass, over the blocks that go on, pays; it is counted where it does.

        What they have not read yet is to be computed sooner or later and does not count.
        """
        going = [block for block in blocks if block.goes_on]
        now = [_chances(block, agreement) for block in blocks]
        longer = [_later_chances(block, agreement) if block.goes_on else _chances(block, agreement) for block in blocks]
        cost = self._drafting.seconds(sum(1 + block.num_tested for block in going))
        return self.is_worth(now, longer, cost, self._drafting.seconds(sum(block.num_pending for block in going)))


def _chances(block: Block, agreement: Agreement) -> list[float]:
    """For each draft token, the probability that it and all before it are accepted."""
    return list(accumulate((*block.estimates(agreement), *block.tail_estimates), mul))[: block.request.limit]


def _later_chances(block: Block, agreement: Agreement) -> list[float]:
    """Those after one more pass: its own token and what it accepts of the tail, then such a tail again."""
    tail = block.tail_estimates
    passed = [agreement.mean, *[agreement.mean * estimate for estimate in tail[: block.num_tested]]]
    chances = list(accumulate((*block.estimates(agreement), *passed), mul))
    after = chances[len(block.ids)]
    chances += [after * chance for chance in accumulate(tail, mul)]
    return chances[: block.request.limit]
