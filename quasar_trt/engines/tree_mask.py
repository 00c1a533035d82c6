"""Which of a sequence's new rows see which, where the last of them are a tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def visible_rows(rows: int, parents: Sequence[int] = ()) -> np.ndarray:
    """[rows, rows] bool: whether a row (of the first index) sees another.

    parents: of the last rows, as `Draft.parents` has them; the rows before are a chain that leads to the root.
    """
    visible = np.tri(rows, dtype=bool)
    root = rows - len(parents)
    for row, parent in enumerate(parents, root):
        visible[row, root:row] = visible[root + parent, root:row] if parent >= 0 else False
    return visible


def depths(visible: np.ndarray) -> np.ndarray:
    """How many rows come before each on its path, int64 [rows], of what `visible_rows` gives."""
    return visible.sum(axis=1) - 1
