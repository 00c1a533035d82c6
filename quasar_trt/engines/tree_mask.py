"""Which of a sequence's new rows see which, where the last of them are a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible_rows(rows: int, parents: Sequence[int] = ()) -> Tensor:
    """[rows, rows] bool: whether a row (of the first index) sees another.

    parents: of the last rows, as `Draft.parents` has them; the rows before are a chain that leads to the root.
    """
    visible = torch.ones(rows, rows, dtype=torch.bool).tril()
    root = rows - len(parents)
    for row, parent in enumerate(parents, root):
        visible[row, root:row] = visible[root + parent, root:row] if parent >= 0 else False
    return visible


def depths(rows: int, parents: Sequence[int] = ()) -> Tensor:
    """How many of the rows come before each of them on its path, [rows]; `parents` as above."""
    return visible_rows(rows, parents).sum(dim=1) - 1
