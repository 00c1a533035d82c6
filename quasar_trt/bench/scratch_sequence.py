"""A sequence on which an engine's passes are timed."""

from __future__ import annotations

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep


class ScratchSequence:
    """`context` cached tokens of id 0; every pass leaves them as they were. To be closed."""

    def __init__(self, engine: Engine, context: int):
        self._engine = engine
        self._context = context
        self._sequence = engine.open()
        max_rows = engine.capabilities.max_rows
        for start in range(0, context, max_rows):
            self._prefill(min(max_rows, context - start))

    def verify(self, rows: int) -> None:
        """One committed token and rows - 1 draft tokens, none of which is accepted."""
        self._engine.step([SequenceStep(self._sequence, [0], Draft((0,) * (rows - 1)))], _reject)
        self._engine.truncate(self._sequence, self._context)

    def prefill(self, rows: int) -> None:
        """A chunk of a prompt that is not its last."""
        self._prefill(rows)
        self._engine.truncate(self._sequence, self._context)

    def close(self) -> None:
        self._engine.close(self._sequence)

    def _prefill(self, rows: int) -> None:
        self._engine.step([SequenceStep(self._sequence, [0] * rows, needs_logits=False)], _reject)


def _reject(index, logits) -> Acceptance:
    return Acceptance((0,), 0)
