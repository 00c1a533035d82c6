"""Steps of an engine, and the logits that come of them."""

from __future__ import annotations

from quasar_trt.engines.base import Acceptance, SequenceStep


def rows_of(engine, batch, keep=None):
    """Logits rows of every entry; `keep` draft tokens (default all) stay in the cache."""
    rows = [None] * len(batch)

    def accept(index, logits):
        rows[index] = logits.copy()
        kept = len(batch[index].draft) if keep is None else keep
        return Acceptance((0,), kept)

    engine.step(batch, accept)
    return rows


def prefill(engine, ids, chunk=None):
    """Opens a sequence, feeds `ids` in chunks and returns (sequence, logits of the last row)."""
    sequence = engine.open()
    chunk = chunk or len(ids)
    for start in range(0, len(ids), chunk):
        last = start + chunk >= len(ids)
        rows = rows_of(engine, [SequenceStep(sequence, ids[start : start + chunk], needs_logits=last)])
    return sequence, rows[0][0]
