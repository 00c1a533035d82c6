"""What an EAGLE head knows of a text, and the tree that grows at its end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quasar_trt.drafters.base import Draft, DraftRequest
from quasar_trt.drafters.confidence import ConfidenceEstimates
from quasar_trt.drafters.eagle_layer import LayerCache, TextRows
from quasar_trt.model_config import ModelConfig


class HeadText:
    """A request's text as the head reads it: row i is the verifier's features of token i and token i + 1.

    cache: of the rows that were read, `num_read` of them; rows behind these are those of a tree. features: [tokens, hidden_size]
    float32 of those that were not read. last: what the head made of the last row.
    """

    def __init__(self, context: Sequence[int], config: ModelConfig):
        self._context = context
        self._config = config
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more."""
        self._end = 0  # of the features that are there
        self.cache = LayerCache(self._config)
        self.num_read = 0
        self.features = np.empty((0, self._config.hidden_size), np.float32)
        self.last: np.ndarray | None = None

    @property
    def end(self) -> int:
        """The position of the first draft token's row."""
        return self._end

    @property
    def is_known(self) -> bool:
        """Whether the verifier has given the features of all tokens but the last."""
        return self._end > 0 and self._end == len(self._context) - 1

    def add(self, position: int, features: np.ndarray) -> None:
        """The features of the tokens from a position on. Behind a gap, whose tokens the verifier took from another sequence's cache, the
        text begins anew; what was there already is what comes again."""
        if position > self._end:
            self.forget()
            self._end = position
        new = features[self._end - position :]
        self.features = np.concatenate([self.features, new])
        self._end += len(new)

    def next_rows(self, most: int) -> tuple[Sequence[int], np.ndarray, TextRows]:
        """Tokens, features and places of the next rows to be read."""
        self.cache.truncate(self.num_read)
        begin, features = self._end - len(self.features), self.features[:most]
        end = begin + len(features)
        return self._context[begin + 1 : end + 1], features, TextRows(self.cache, range(begin, end))

    def read(self, count: int, last: np.ndarray) -> None:
        """So many of the next rows have been read, and this has come of the last one."""
        self.num_read += count
        self.features, self.last = self.features[count:], last


class Growth:
    """A tree of draft tokens at the end of a text, depth by depth.

    width: tokens that are continued at each depth, and continuations of each.
    """

    def __init__(self, request: DraftRequest, text: HeadText, width: int):
        text.cache.truncate(text.num_read)
        self.request = request
        self.text = text
        self.width = width
        self._ids: list[int] = []
        self._parents: list[int] = []
        self._probabilities: list[float] = []  # of each token after its parent
        self._paths: list[float] = []  # the product of those on its path
        self._features: list[np.ndarray] = []  # before each token
        self._continued = [-1]  # tokens whose continuations come next, -1 for the text itself
        self._newest: list[int] = []
        self._slots: dict[int, int] = {}  # of the tokens that were continued: their rows behind those of the text
        self._depth = 0

    def add(self, ids: np.ndarray, probabilities: np.ndarray, features: np.ndarray) -> None:
        """The next depth: ids and probabilities [continued tokens, width], features [continued tokens, hidden_size]."""
        self._newest = range(len(self._ids), len(self._ids) + ids.size)
        rows = zip(self._continued, ids.tolist(), probabilities.tolist(), features, strict=True)
        for parent, some_ids, some_probabilities, before in rows:
            path = self._paths[parent] if parent >= 0 else 1.0
            for token, probability in zip(some_ids, some_probabilities, strict=True):
                self._ids.append(token)
                self._parents.append(parent)
                self._probabilities.append(probability)
                self._paths.append(path * probability)
                self._features.append(before)
        self._depth += 1

    def next_rows(self) -> tuple[list[int], np.ndarray, TextRows]:
        """Tokens, features and places of the likeliest of the newest tokens, which are continued now."""
        chosen = sorted(self._newest, key=lambda index: -self._paths[index])[: self.width]
        num_text, num_slots = self.text.num_read, len(self._slots)
        visible = np.zeros((len(chosen), num_text + num_slots + len(chosen)), bool)
        visible[:, :num_text] = True
        for row, index in enumerate(chosen):
            self._slots[index] = num_slots + row
            above = index
            while above >= 0:
                visible[row, num_text + self._slots[above]] = True
                above = self._parents[above]
        self._continued = chosen
        positions = [self.text.end + self._depth - 1] * len(chosen)
        tokens = [self._ids[index] for index in chosen]
        features = np.stack([self._features[index] for index in chosen])
        return tokens, features, TextRows(self.text.cache, positions, visible)

    def draft(self, estimates: ConfidenceEstimates) -> Draft:
        """The likeliest tokens."""
        order = sorted(range(len(self._ids)), key=lambda index: (-self._paths[index], index))[: self.request.limit]
        places = {index: place for place, index in enumerate(order)} | {-1: -1}
        return Draft(
            tuple(self._ids[index] for index in order),
            tuple(places[self._parents[index]] for index in order),
            estimates=tuple(estimates.of(self._probabilities[index]) for index in order),
        )

    def count(self, emitted: Sequence[int], estimates: ConfidenceEstimates) -> None:
        """The emitted ids tell which continuations were right, along the path that they take."""
        at = -1
        for token in emitted:
            children = [index for index, parent in enumerate(self._parents) if parent == at]
            for index in children:
                estimates.count(self._probabilities[index], self._ids[index] == token)
            at = next((index for index in children if self._ids[index] == token), None)
            if at is None:
                break
