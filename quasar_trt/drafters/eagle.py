"""The eagle drafter: a small head goes on from the verifier's hidden states, token by token, and grows a tree of what may follow.

The tree is EAGLE-2's (Li et al., arXiv 2406.16858): at each depth the likeliest tokens by the product of the head's probabilities along
their paths are continued, and of all tokens the likeliest are proposed. The same tree is grown on EAGLE's and EAGLE-3's heads. Drafts
carry no probabilities: the sampled tokens are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from quasar_trt.drafters.base import Draft, Drafter, DraftRequest, check_num_speculative_tokens
from quasar_trt.drafters.confidence import MOST_GUESSES, ConfidenceEstimates, RankEstimates, most_probable
from quasar_trt.drafters.draft_linear import DraftLinears, check_quantization
from quasar_trt.drafters.eagle_growth import Growth, HeadText
from quasar_trt.drafters.eagle_head import EagleHead
from quasar_trt.drafters.eagle_layer import LayerPart
from quasar_trt.drafters.head_files import check_engine
from quasar_trt.drafters.head_passes import HeadPasses
from quasar_trt.engines.base import Engine
from quasar_trt.errors import named_options
from quasar_trt.model_config import whole_number
from quasar_trt.step_cost import StepCost


@named_options("eagle drafter option")
@dataclass(frozen=True)
class EagleOptions:
    """num_speculative_tokens: the most draft tokens per request and step; None for as many as the engine allows.

    depth: the most draft tokens of a path. top_k: tokens that are continued at each depth, and continuations of each. Each is at
    most MOST_GUESSES.
    quantization: of the head's weights, "int8" or "none".
    """

    num_speculative_tokens: int | None = None
    depth: int = 5
    top_k: int = 4
    quantization: str = "int8"

    def __post_init__(self):
        check_num_speculative_tokens(self.num_speculative_tokens)
        whole_number("depth", self.depth, most=MOST_GUESSES)
        whole_number("top_k", self.top_k, most=MOST_GUESSES)
        check_quantization(self.quantization)


class EagleDrafter(Drafter):
    """directory: of the head. `options` are those of EagleOptions. Raises QuasarError for unknown or wrong options."""

    def __init__(self, directory: str | Path, **options):
        self.options = EagleOptions(**options)
        self.num_speculative_tokens = self.options.num_speculative_tokens
        self._directory = Path(directory)
        self._estimates = ConfidenceEstimates()
        self._ranks = RankEstimates(self.options.depth, self.options.top_k)
        self._texts: dict[int, HeadText] = {}
        self._grown: dict[int, Growth] = {}
        self._is_asked = True  # whether it was worth it the last time

    def attach(self, engine: Engine, step_cost: StepCost | None, tokenizer: object | None) -> None:
        check_engine(engine, "eagle")
        linears = DraftLinears(engine, self.options.quantization)
        self._head = EagleHead(self._directory, engine, self.options.depth * self.options.top_k, linears)
        self.hidden_layers = self._head.hidden_layers
        self._passes = HeadPasses(engine, step_cost, self._run_once, engine.max_seq_len)

    def start(self, request_id: int, context: Sequence[int]) -> None:
        self._texts[request_id] = HeadText(context, self._head.layer)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        growths = [
            Growth(request, self._texts[request.request_id], self.options.top_k if request.tree else 1)
            for request in batch
        ]
        self._passes.begin()
        # A prompt's last token enters the cache in the same pass as its draft would.
        going = [growth for growth in growths if growth.text.is_known]
        if going:
            self._is_asked = False
        while going and self._is_worth(growths, going):
            self._is_asked = True
            self._grow(going)
            going = [each for each in going if each.depth < min(self.options.depth, each.request.limit)]
        self.seconds = self._passes.seconds
        self._grown.update((growth.request.request_id, growth) for growth in growths if growth.depth)
        return [growth.draft(self._estimates) for growth in growths]

    def read_states(self, request_id: int, position: int, states: np.ndarray) -> None:
        text = self._texts[request_id]
        text.add(position, states)
        most = self._head.layer.max_rows
        if text.num_pending > most:  # of a prompt, or while the head is not asked; states are large
            if self._is_asked:
                self._read([text])
            else:
                text.keep_last(most // 2)  # half, so that it is not done, which copies them, for each token

    def observe(self, request_id: int, emitted: Sequence[int], num_accepted_tokens: int) -> None:
        growth = self._grown.pop(request_id, None)
        if growth:
            growth.count(emitted, self._estimates, self._ranks)

    def pause(self, request_id: int) -> None:
        self._texts[request_id].forget()

    def stop(self, request_id: int) -> None:
        self._texts.pop(request_id).forget()
        self._grown.pop(request_id, None)

    def _is_worth(self, growths: Sequence[Growth], going: Sequence[Growth]) -> bool:
        """Whether one more depth is; what the verifier has read is to be read by the head sooner or later and does not count."""
        longer = [growth.later_chances(self._ranks) if growth in going else growth.chances for growth in growths]
        num_pending = sum(growth.text.num_pending for growth in going)
        num_rows = sum(growth.num_rows for growth in going)
        return self._passes.is_worth([growth.chances for growth in growths], longer, num_rows, num_pending)

    def _grow(self, growths: Sequence[Growth]) -> None:
        """Adds one depth; before the first the head reads what the verifier has read."""
        began = perf_counter()
        if growths[0].depth:
            num_rows = sum(growth.num_rows for growth in growths)
            features = self._continue(growths)
        else:
            num_rows = self._read([growth.text for growth in growths])
            features = [growth.text.last[None] for growth in growths]
        ids, probabilities = most_probable(self._head.logits(np.concatenate(features)), growths[0].width)
        ids, first = self._head.token_ids(ids), 0
        for growth, before in zip(growths, features, strict=True):
            rows = slice(first, first := first + len(before))
            growth.add(ids[rows], probabilities[rows], before, self._estimates)
        self._passes.observe(num_rows, perf_counter() - began)

    def _continue(self, growths: Sequence[Growth]) -> list[np.ndarray]:
        """The head's features after the tokens of each growth that are continued now."""
        features: list[np.ndarray] = []
        most = self._head.layer.max_rows // max(growth.num_rows for growth in growths)
        for first in range(0, len(growths), most):
            together = growths[first : first + most]
            found = self._run([growth.next_rows() for growth in together])
            ends = np.cumsum([growth.num_rows for growth in together])
            features += [growth.newest(found[:end]) for growth, end in zip(together, ends, strict=True)]
        return features

    def _read(self, texts: Sequence[HeadText]) -> int:
        """The head reads what the verifier has read; returns how many rows."""
        num_rows = 0
        while behind := [text for text in texts if text.num_readable]:
            left, parts = self._head.layer.max_rows, []
            for text in behind:
                if left:
                    tokens, states, part = text.next_rows(left)
                    parts.append((tokens, self._head.features(states), part))
                    left -= len(tokens)
            ends = np.cumsum([len(tokens) for tokens, _, _ in parts])
            found = self._run(parts)
            for text, (tokens, _, _), end in zip(behind, parts, ends, strict=False):
                text.read(len(tokens), found[end - 1])
            num_rows += int(ends[-1])
        return num_rows

    def _run(self, parts: Sequence[tuple[Sequence[int], np.ndarray, LayerPart]]) -> np.ndarray:
        """The head's features after tokens, features and places of several texts."""
        tokens, features, places = zip(*parts, strict=True)
        return self._head([token for each in tokens for token in each], np.concatenate(features), places)

    def _run_once(self, num_rows: int) -> None:
        """A pass of so many rows, to see what it costs."""
        text = self._head.layer.open()
        features = np.zeros((num_rows, self._head.config.hidden_size), np.float32)
        found = self._run([([0] * num_rows, features, LayerPart(text, num_rows))])
        # Of a tree's rows some have been read before, and give no logits.
        most_probable(self._head.logits(found[-max(self.options.top_k, num_rows // 2) :]), self.options.top_k)
        self._head.layer.close(text)
