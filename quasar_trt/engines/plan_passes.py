"""A step of the engine of plans as passes: which sequences share one, and what each of them gets from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import SequenceStep
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.engines.plan_session import PlanSession


@dataclass(frozen=True)
class SlotStep:
    """What a slot, which holds `past` tokens, gets in a step.

    ids: its new rows, the draft tokens last; parents: of the last rows, as `branching` gives them. wanted: how many rows, the last,
    have logits.
    """

    slot: int
    past: int
    ids: Sequence[int]
    parents: Sequence[int]
    wanted: int

    @classmethod
    def of(cls, entry: SequenceStep, slot: int, past: int) -> SlotStep:
        ids, wanted = (*entry.tokens, *entry.draft.ids), (1 + len(entry.draft)) * entry.needs_logits
        return cls(slot, past, ids, branching(entry.draft), wanted)


def branching(draft: Draft) -> tuple[int, ...]:
    """The parents of a tree behind the chain that it begins with, as `Draft.parents` has them, -1 for that chain's last token; of a
    chain none. A prompt that is scored is such a beginning, longer than a pass."""
    if not draft.is_tree:
        return ()
    first = min(parent for index, parent in enumerate(draft.parents) if parent != index - 1) + 1
    return tuple(parent - first for parent in draft.parents[first:])


@dataclass(frozen=True)
class SlotRows:
    """What comes of it. logits: float32 [wanted, vocab], valid until the next step; states: float32 [rows, kept places, hidden_size]."""

    logits: np.ndarray
    states: np.ndarray


class PlanPasses:
    """places: whose hidden states passes keep."""

    def __init__(self, session: PlanSession, sizes: PlanSizes, hidden_size: int):
        self.places: tuple[int, ...] = ()
        self._session = session
        self._sizes = sizes
        self._hidden_size = hidden_size

    def keep_states(self, places: Sequence[int]) -> None:
        """As `PlanMemory.keep_states`."""
        self._session.memory.keep_states(places)
        self.places = tuple(places)

    def run(self, steps: Sequence[SlotStep], lengths: np.ndarray) -> list[SlotRows]:
        """lengths: int32, the tokens that each slot holds, whether it has a step or not."""
        together = [index for index, step in enumerate(steps) if len(step.ids) <= self._sizes.verify.rows]
        # In this order: a slot between those that run together gets padding where its own rows belong.
        found = self._together(steps, together, lengths)
        return [found[index] if index in found else self._alone(step) for index, step in enumerate(steps)]

    def _together(self, steps: Sequence[SlotStep], indices: Sequence[int], lengths: np.ndarray) -> dict[int, SlotRows]:
        """One pass over those of the steps, by index."""
        if not indices:
            return {}
        slots = [steps[index].slot for index in indices]
        first, width = min(slots), max(len(steps[index].ids) for index in indices)
        ids = np.zeros((max(slots) + 1 - first, width), np.int32)
        wanted: list[int] = []
        trees, places = {}, {}  # index -> (its rows of the pass, its rows of logits)
        for index in indices:
            step = steps[index]
            row, count = step.slot - first, len(step.ids)
            ids[row, :count] = step.ids
            end = row * width + count
            places[index] = slice(end - count, end), slice(len(wanted), len(wanted) + step.wanted)
            wanted += range(end - step.wanted, end)
            if step.parents:
                trees[row] = count, step.parents
        logits = self._session.run(first, ids, lengths[first : first + len(ids)], wanted, trees)
        if len(indices) < len(steps):  # further passes are to come
            logits = logits.copy()
        states = self._states(ids.size)
        return {index: SlotRows(logits[scored], states[rows]) for index, (rows, scored) in places.items()}

    def _alone(self, step: SlotStep) -> SlotRows:
        """A slot with many rows, in passes without padding."""
        count, largest = len(step.ids), self._sizes.largest.rows
        logits, states, start = [], [], 0
        while start < count:
            end = min(start + largest, count)
            if end < count:  # the rows of a tree see each other, in the last pass
                end = min(end, count - len(step.parents))
            part = np.array([step.ids[start:end]], np.int32)
            wanted = range(max(0, count - step.wanted - start), part.size)
            trees = {0: (part.size, step.parents)} if step.parents and end == count else {}
            past = np.array([step.past + start], np.int32)
            logits.append(self._session.run(step.slot, part, past, wanted, trees).copy())
            states.append(self._states(part.size))
            start = end
        return SlotRows(np.concatenate(logits), np.concatenate(states))

    def _states(self, rows: int) -> np.ndarray:
        """Of the first rows of the last pass, [rows, kept places, hidden_size]."""
        found = np.empty((rows, len(self.places), self._hidden_size), np.float32)
        for number, place in enumerate(self.places):
            found[:, number] = self._session.memory.states(place, rows)
        return found
