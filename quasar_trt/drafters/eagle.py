"""The eagle drafter: a small head goes on from the verifier's hidden states, token by token, and grows a tree of what may follow.

The tree is EAGLE-2's (Li et al., arXiv 2406.16858): at each depth the likeliest tokens by the product of the head's probabilities along
their paths are continued, and of all tokens the likeliest are proposed. The same tree is grown on EAGLE's and EAGLE-3's heads. Drafts
carry no probabilities: the sampled tokens are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest, check_num_speculative_tokens
from quasar_trt.drafters.confidence import ConfidenceEstimates, most_probable
from quasar_trt.drafters.draft_linear import draft_pool
from quasar_trt.drafters.eagle_growth import Growth, HeadText
from quasar_trt.drafters.eagle_head import EagleHead
from quasar_trt.drafters.eagle_layer import TextRows
from quasar_trt.drafters.head_files import check_engine
from quasar_trt.engines.base import Engine
from quasar_trt.errors import named_options
from quasar_trt.model_config import whole_number
from quasar_trt.step_cost import StepCost

_MOST_ROWS = 256  # of a text in one pass of the head


@named_options("eagle drafter option")
@dataclass(frozen=True)
class EagleOptions:
    """num_speculative_tokens: the most draft tokens per request and step; None for as many as the engine allows.

    depth: the most draft tokens of a path. top_k: tokens that are continued at each depth, and continuations of each.
    """

    num_speculative_tokens: int | None = None
    depth: int = 5
    top_k: int = 4

    def __post_init__(self):
        check_num_speculative_tokens(self.num_speculative_tokens)
        whole_number("depth", self.depth)
        whole_number("top_k", self.top_k)


class EagleDrafter(Drafter):
    """directory: of the head. `options` are those of EagleOptions. Raises QuasarError for unknown or wrong options."""

    def __init__(self, directory: str | Path, **options):
        self.options = EagleOptions(**options)
        self.num_speculative_tokens = self.options.num_speculative_tokens
        self._directory = Path(directory)
        self._estimates = ConfidenceEstimates()
        self._texts: dict[int, HeadText] = {}
        self._grown: dict[int, Growth] = {}

    def attach(self, engine: Engine, step_cost: StepCost | None, tokenizer: object | None) -> None:
        check_engine(engine, "eagle")
        most_positions = engine.max_seq_len + self.options.depth
        self._head = EagleHead(self._directory, engine, most_positions, draft_pool(engine))
        self.hidden_layers = self._head.hidden_layers

    def start(self, request_id: int, context: Sequence[int]) -> None:
        self._texts[request_id] = HeadText(context, self._head.config)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        texts = [self._texts[request.request_id] for request in batch]
        # A prompt's last token enters the cache in the same pass as its draft would.
        known = [text for text in texts if text.is_known]
        self._read(known)
        growths = {
            index: Growth(request, text, self.options.top_k if request.tree else 1)
            for index, (request, text) in enumerate(zip(batch, texts, strict=True))
            if text.is_known
        }
        self._grow(list(growths.values()))
        for index, growth in growths.items():
            self._grown[batch[index].request_id] = growth
        return [growths[index].draft(self._estimates) if index in growths else NO_DRAFT for index in range(len(batch))]

    def read_states(self, request_id: int, position: int, states: np.ndarray) -> None:
        self._texts[request_id].add(position, self._head.features(states))

    def observe(self, request_id: int, emitted: Sequence[int], num_accepted_tokens: int) -> None:
        growth = self._grown.pop(request_id, None)
        if growth:
            growth.count(emitted, self._estimates)

    def pause(self, request_id: int) -> None:
        self._texts[request_id].forget()

    def stop(self, request_id: int) -> None:
        del self._texts[request_id]
        self._grown.pop(request_id, None)

    def _read(self, texts: Sequence[HeadText]) -> None:
        """The head reads what the verifier has read."""
        while behind := [text for text in texts if len(text.features)]:
            parts = [text.next_rows(_MOST_ROWS) for text in behind]
            counts = [len(tokens) for tokens, _, _ in parts]
            found = self._run(parts)
            for text, count, end in zip(behind, counts, np.cumsum(counts), strict=True):
                text.read(count, found[end - 1])

    def _grow(self, growths: Sequence[Growth]) -> None:
        """Adds one depth after the other."""
        features = np.stack([growth.text.last for growth in growths]) if growths else None
        counts = [1] * len(growths)
        for depth in range(1, self.options.depth + 1):
            if not growths:
                break
            ids, probabilities = most_probable(self._head.logits(features), growths[0].width)
            ids, first = self._head.token_ids(ids), 0
            for growth, count in zip(growths, counts, strict=True):
                rows = slice(first, first := first + count)
                growth.add(ids[rows], probabilities[rows], features[rows])
            growths = [growth for growth in growths if depth < min(self.options.depth, growth.request.limit)]
            if growths:
                parts = [growth.next_rows() for growth in growths]
                counts = [len(tokens) for tokens, _, _ in parts]
                features = self._run(parts)

    def _run(self, parts: Sequence[tuple[Sequence[int], np.ndarray, TextRows]]) -> np.ndarray:
        """The head's features after tokens, features and places of several texts."""
        tokens, features, rows = zip(*parts, strict=True)
        return self._head([token for each in tokens for token in each], np.concatenate(features), rows)
