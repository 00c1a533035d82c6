"""What two models' next-token distributions over the same rows have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_TOP = 5


class Comparison:
    """Collects rows of logits, keeps a few numbers of each and gives the figures over all rows.

    P is the source's distribution and Q the engine's, both in float64. KL(P || Q) = sum_v P(v) (log P(v) - log Q(v)), in
    nats. A row's rank is the number of tokens that the engine finds more probable than the source's most probable token;
    tokens that the engine finds equal share their rank.
    """

    def __init__(self):
        # Plain lists: small tensors kept between the large ones that come and go would scatter the heap, which then grows.
        self._kl: list[float] = []
        self._ranks: list[int] = []
        self._source_next: list[float] = []
        self._engine_next: list[float] = []

    def add(self, source_logits: Tensor, engine_logits: Tensor, following: Sequence[int]) -> None:
        """source_logits [rows, vocab]; engine_logits [rows, vocab or more], what is beyond the vocabulary is padding.

        following: the ids that follow the rows, one fewer where the last row ends its window. A token may have the logit
        -inf; one that only the engine excludes makes KL infinite.
        """
        p = source_logits.double().log_softmax(dim=-1)
        q = engine_logits[:, : p.shape[1]].double().log_softmax(dim=-1)
        probability = p.exp()
        # The limit of P log P is 0, also where log P and log Q are -inf.
        self._kl += (probability * (p - q)).masked_fill(probability == 0, 0.0).sum(dim=-1).tolist()
        self._ranks += (q > q.gather(1, p.argmax(dim=-1, keepdim=True))).sum(dim=-1).tolist()
        rows, ids = torch.arange(len(following)), torch.tensor(following, dtype=torch.long)
        self._source_next += p[rows, ids].tolist()
        self._engine_next += q[rows, ids].tolist()

    def figures(self) -> dict[str, float | int]:
        """`kl`, its `kl_standard_error` and `kl_p99` (the 99th percentile over rows); `top1_agreement`, its
        `top1_standard_error`, and `top5_agreement`: the share of rows whose rank is 0, and below 5; `source_perplexity` and
        `engine_perplexity` of the ids that follow; `tokens`, the number of rows. At least 2 rows are needed.
        """
        kl, ranks = torch.tensor(self._kl, dtype=torch.float64), torch.tensor(self._ranks)
        top1 = (ranks == 0).double()
        return {
            "kl": kl.mean().item(),
            "kl_standard_error": standard_error(kl),
            "kl_p99": kl.quantile(0.99).item(),
            "top1_agreement": top1.mean().item(),
            "top1_standard_error": standard_error(top1),
            "top5_agreement": (ranks < _TOP).double().mean().item(),
            "source_perplexity": _perplexity(self._source_next),
            "engine_perplexity": _perplexity(self._engine_next),
            "tokens": len(kl),
        }


def standard_error(values: Tensor) -> float:
    """Of the mean of n values in the order of the text, by batch means (Jones et al. 2006, JASA 101, 1537).

    Neighbouring rows are alike, so the spread is taken from the means of runs of sqrt(n) rows each, which are less so.
    """
    size = math.isqrt(len(values))
    means = values[: len(values) // size * size].view(-1, size).mean(dim=1)
    return math.sqrt(size / len(values)) * means.std().item()


def _perplexity(log_probs: Sequence[float]) -> float:
    return torch.tensor(log_probs, dtype=torch.float64).mean().neg().exp().item()
