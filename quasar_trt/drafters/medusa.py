"""The medusa drafter: heads on the verifier's hidden states guess several tokens ahead, each by itself.

Every combination of what the heads guess is a path; the tree grows where the product of their probabilities is largest. Drafts carry no
probabilities: the sampled tokens are those of plain decoding (Medusa's "typical acceptance" would emit others).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest, check_num_speculative_tokens
from quasar_trt.drafters.confidence import MOST_GUESSES, ConfidenceEstimates, RankEstimates, most_probable
from quasar_trt.drafters.draft_linear import DraftLinears, check_quantization
from quasar_trt.drafters.head_files import check_engine
from quasar_trt.drafters.head_passes import HeadPasses
from quasar_trt.drafters.medusa_heads import MedusaHeads
from quasar_trt.drafters.tree import likeliest_tree
from quasar_trt.engines.base import Engine
from quasar_trt.errors import named_options
from quasar_trt.model_config import whole_number
from quasar_trt.step_cost import StepCost


@named_options("medusa drafter option")
@dataclass(frozen=True)
class MedusaOptions:
    """num_speculative_tokens: the most draft tokens per request and step; None for as many as the engine allows.

    top_k: guesses of each head that a tree may hold, at most MOST_GUESSES. quantization: of the heads' weights, "int8" or "none".
    """

    num_speculative_tokens: int | None = None
    top_k: int = 4
    quantization: str = "int8"

    def __post_init__(self):
        check_num_speculative_tokens(self.num_speculative_tokens)
        whole_number("top_k", self.top_k, most=MOST_GUESSES)
        check_quantization(self.quantization)


class MedusaDrafter(Drafter):
    """directory: of the heads. `options` are those of MedusaOptions. Raises QuasarError for unknown or wrong options."""

    def __init__(self, directory: str | Path, **options):
        self.options = MedusaOptions(**options)
        self.num_speculative_tokens = self.options.num_speculative_tokens
        self._directory = Path(directory)
        self._estimates = ConfidenceEstimates()
        self._states: dict[int, tuple[int, np.ndarray]] = {}  # the last token's position and state
        self._guesses: dict[int, list[list[tuple[int, float]]]] = {}  # of each head: ids and probabilities
        self._usual_drafts: dict[tuple[bool, int], list[float]] = {}  # see `_usual`

    def attach(self, engine: Engine, step_cost: StepCost | None, tokenizer: object | None) -> None:
        check_engine(engine, "medusa")
        config = engine.config
        self.hidden_layers = (config.num_hidden_layers,)
        linears = DraftLinears(engine, self.options.quantization)
        self._heads = MedusaHeads(self._directory, engine, linears)
        self._ranks = RankEstimates(self._heads.num_heads, self.options.top_k)
        self._passes = HeadPasses(
            engine, step_cost, lambda rows: self._guess(np.zeros((rows, config.hidden_size), np.float32))
        )

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        self._passes.begin()
        # A prompt's last token enters the cache in the same pass as its draft would.
        ready = [index for index, request in enumerate(batch) if self._knows(request)]
        drafts = [NO_DRAFT] * len(batch)
        if ready and self._is_worth(batch, ready):
            states = np.stack([self._states[batch[index].request_id][1] for index in ready])
            began = perf_counter()
            heads = self._guess(states)
            self._passes.observe(len(ready), perf_counter() - began)
            for row, index in enumerate(ready):
                guesses = [
                    list(zip(ids[row].tolist(), probabilities[row].tolist(), strict=True))
                    for ids, probabilities in heads
                ]
                self._guesses[batch[index].request_id] = guesses
                drafts[index] = self._draft(batch[index], guesses)
        self.seconds = self._passes.seconds
        return drafts

    def read_states(self, request_id: int, position: int, states: np.ndarray) -> None:
        self._states[request_id] = position + len(states) - 1, states[-1, 0]

    def observe(self, request_id: int, emitted: Sequence[int], num_accepted_tokens: int) -> None:
        guessed = self._guesses.pop(request_id, ())
        if guessed:
            self._usual_drafts.clear()
        for depth, (guesses, right) in enumerate(zip(guessed, emitted, strict=False)):
            for rank, (token, probability) in enumerate(guesses):
                self._estimates.count(probability, token == right)
                self._ranks.count(depth, rank, token == right)

    def stop(self, request_id: int) -> None:
        self._states.pop(request_id, None)
        self._guesses.pop(request_id, None)

    def _knows(self, request: DraftRequest) -> bool:
        """Whether the state before the context's last token is there."""
        return self._states.get(request.request_id, (-1,))[0] == len(request.context) - 2

    def _guess(self, states: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and probabilities [rows, top_k] of each head."""
        return [most_probable(logits, self.options.top_k) for logits in self._heads(states)]

    def _is_worth(self, batch: Sequence[DraftRequest], ready: Sequence[int]) -> bool:
        """Whether guesses as good as they mostly are would be."""
        later = [self._usual(request) if index in ready else [] for index, request in enumerate(batch)]
        return self._passes.is_worth([[]] * len(batch), later, len(ready))

    def _usual(self, request: DraftRequest) -> list[float]:
        """The probabilities of a draft of such guesses."""
        form = request.tree, request.limit
        if form not in self._usual_drafts:
            every = range(self.options.top_k)
            means = [[(rank, self._ranks.of(depth, rank)) for rank in every] for depth in range(self._heads.num_heads)]
            self._usual_drafts[form] = self._tree(request, means).probabilities
        return self._usual_drafts[form]

    def _draft(self, request: DraftRequest, guesses: list[list[tuple[int, float]]]) -> Draft:
        draft = self._tree(request, guesses)
        return replace(draft, estimates=tuple(map(self._estimates.of, draft.estimates)))

    def _tree(self, request: DraftRequest, guesses: list[list[tuple[int, float]]]) -> Draft:
        """The likeliest combinations of guesses (id, probability) of each head."""
        most = self.options.top_k if request.tree else 1

        def continuations(depth: int):
            found = guesses[depth][:most] if depth < len(guesses) else []
            return [(token, probability, depth + 1) for token, probability in found]

        return likeliest_tree(0, continuations, request.limit)
