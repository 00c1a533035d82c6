"""What an EAGLE head knows of a text, and the tree that grows at its end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quasar_trt.drafters.base import NO_DRAFT, Draft, DraftRequest
from quasar_trt.drafters.confidence import ConfidenceEstimates, RankEstimates
from quasar_trt.drafters.eagle_layer import EagleLayer, LayerPart


class HeadText:
    """A request's text as the head reads it: row i is the verifier's states of token i and token i + 1.

    num_read: rows in the layer's cache. num_pending: tokens that were not read. last: what the head made of the last row.
    """

    def __init__(self, context: Sequence[int], layer: EagleLayer):
        self._context = context
        self._layer = layer
        self._text: int | None = None  # the layer's handle
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more."""
        if self._text is not None:
            self._layer.close(self._text)
        self._text = None
        self._end = 0  # of the states that are there
        self.num_read = self.num_pending = 0
        self._pending: list[np.ndarray] = []  # their states
        self.last: np.ndarray | None = None

    @property
    def is_known(self) -> bool:
        """Whether the verifier has given the states of all tokens but the last."""
        return self._end > 0 and self._end == len(self._context) - 1

    @property
    def num_readable(self) -> int:
        """Pending tokens whose next one is known."""
        return min(self.num_pending, len(self._context) - 1 - (self._end - self.num_pending))

    def add(self, position: int, states: np.ndarray) -> None:
        """The states [tokens, places, hidden_size] of the tokens from a position on. Behind a gap, whose tokens the verifier took from
        another sequence's cache, the text begins anew; what was there already is what comes again."""
        if position > self._end:
            self.forget()
            self._end = position
        new = states[self._end - position :]
        if len(new):
            self._pending.append(new)
            self.num_pending += len(new)
            self._end += len(new)

    def keep_last(self, count: int) -> None:
        """Nothing but the last `count` pending tokens is known any more."""
        states, end = np.concatenate(self._pending)[-count:], self._end
        self.forget()
        self._end = end - count
        self.add(self._end, states)

    def next_rows(self, most: int) -> tuple[Sequence[int], np.ndarray, LayerPart]:
        """Tokens, states and place of the next rows to be read."""
        if self._text is None:
            self._text = self._layer.open()
        self._pending = [np.concatenate(self._pending)]
        begin, states = self._end - self.num_pending, self._pending[0][: min(most, self.num_readable)]
        return self._context[begin + 1 : begin + 1 + len(states)], states, self.part(len(states))

    def part(self, num_rows: int, parents: Sequence[int] = ()) -> LayerPart:
        """The place of rows that come behind those that were read."""
        self._layer.truncate(self._text, self.num_read)
        return LayerPart(self._text, num_rows, parents)

    def read(self, count: int, last: np.ndarray) -> None:
        """So many of the next rows have been read, and this has come of the last one."""
        self.num_read += count
        self.num_pending -= count
        self._pending, self.last = [self._pending[0][count:]] if self.num_pending else [], last


class Growth:
    """A tree of draft tokens at the end of a text, depth by depth.

    width: tokens that are continued at each depth, and continuations of each. chances: of each token, the probability that it and
    those before it on its path are accepted.
    """

    def __init__(self, request: DraftRequest, text: HeadText, width: int):
        self.request = request
        self.text = text
        self.width = width
        self._ids: list[int] = []
        self._parents: list[int] = []
        self._probabilities: list[float] = []  # of each token after its parent
        self._paths: list[float] = []  # the product of those on its path
        self.chances: list[float] = []
        self._features: list[np.ndarray] = []  # before each token
        self._ranks: list[int] = []  # of each token among its siblings
        self._rows: list[int] = []  # the tokens that the head reads, those that are continued next last
        self._continued = [-1]  # tokens whose continuations come next, -1 for the text itself
        self.depth = 0

    @property
    def num_rows(self) -> int:
        """That the head reads for the next depth."""
        return len(self._rows) or 1

    def later_chances(self, ranks: RankEstimates) -> list[float]:
        """Those that are expected after one more depth."""
        found = list(self.chances)
        for index in self._continued:
            before = self.chances[index] if index >= 0 else 1.0
            found += [before * ranks.of(self.depth, rank) for rank in range(self.width)]
        return sorted(found, reverse=True)[: self.request.limit]

    def add(
        self, ids: np.ndarray, probabilities: np.ndarray, features: np.ndarray, estimates: ConfidenceEstimates
    ) -> None:
        """The next depth: ids and probabilities [continued tokens, width], features [continued tokens, hidden_size]."""
        newest = range(len(self._ids), len(self._ids) + ids.size)
        rows = zip(self._continued, ids.tolist(), probabilities.tolist(), features, strict=True)
        for parent, some_ids, some_probabilities, before in rows:
            path, chance = (self._paths[parent], self.chances[parent]) if parent >= 0 else (1.0, 1.0)
            for rank, (token, probability) in enumerate(zip(some_ids, some_probabilities, strict=True)):
                self._ids.append(token)
                self._parents.append(parent)
                self._probabilities.append(probability)
                self._paths.append(path * probability)
                self.chances.append(chance * estimates.of(probability))
                self._features.append(before)
                self._ranks.append(rank)
        self.depth += 1
        self._continued = sorted(newest, key=lambda index: -self._paths[index])[: self.width]
        self._rows += self._continued

    def next_rows(self) -> tuple[list[int], np.ndarray, LayerPart]:
        """Tokens, features and place of those that are continued now, behind all that lead to them: read anew, those cost little,
        and the layer's cache holds the text alone."""
        places = {index: place for place, index in enumerate(self._rows)} | {-1: -1}
        parents = [places[self._parents[index]] for index in self._rows]
        features = np.stack([self._features[index] for index in self._rows])
        return [self._ids[index] for index in self._rows], features, self.text.part(len(parents), parents)

    def newest(self, features: np.ndarray) -> np.ndarray:
        """Of features [rows, hidden_size] behind such rows those of the tokens that are continued now."""
        return features[-len(self._continued) :]

    def draft(self, estimates: ConfidenceEstimates) -> Draft:
        """The likeliest tokens."""
        if not self._ids:
            return NO_DRAFT
        order = sorted(range(len(self._ids)), key=lambda index: (-self._paths[index], index))[: self.request.limit]
        places = {index: place for place, index in enumerate(order)} | {-1: -1}
        return Draft(
            tuple(self._ids[index] for index in order),
            tuple(places[self._parents[index]] for index in order),
            estimates=tuple(estimates.of(self._probabilities[index]) for index in order),
        )

    def count(self, emitted: Sequence[int], estimates: ConfidenceEstimates, ranks: RankEstimates) -> None:
        """The emitted ids tell which continuations were right, along the path that they take."""
        at = -1
        for depth, token in enumerate(emitted):
            children = [index for index, parent in enumerate(self._parents) if parent == at]
            for index in children:
                estimates.count(self._probabilities[index], self._ids[index] == token)
                ranks.count(depth, self._ranks[index], self._ids[index] == token)
            at = next((index for index in children if self._ids[index] == token), None)
            if at is None:
                break
