"""The basis of the source model, in which drafters read hidden states whatever basis the engine computes in.

With Q the rotation of an engine's residual stream and w the weight of the source's final norm, which the engine's head carries,
a state x Q between layers is x in the source, and a state y Q behind the final norm is y * w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import FileRecord, TensorSpec, TensorWriter, map_tensors

if TYPE_CHECKING:
    from torch import Tensor

    Array = np.ndarray | Tensor

FILE = "basis.safetensors"  # of an engine directory, where the engine is rotated


@dataclass(frozen=True)
class SourceBasis:
    """rotation: Q float32 [hidden_size, hidden_size]; norm: w float32 [hidden_size]; both None where the bases are one.

    Arrays, or tensors of a device: of these are what methods take and give then.
    """

    rotation: Array | None = None
    norm: Array | None = None

    @classmethod
    def open(cls, directory: Path, recipe: Recipe) -> SourceBasis | None:
        """That of an engine directory; None where it is not recorded. Raises QuasarError for a damaged file."""
        if not recipe.rotate:
            return cls()
        path = Path(directory) / FILE
        if not path.is_file():
            return None
        tensors = map_tensors(path)
        return cls(tensors["rotation"], tensors["norm"])

    def write(self, directory: Path) -> FileRecord:
        """Records it in an engine directory."""
        tensors = {"rotation": self.rotation, "norm": self.norm}
        spec = {name: TensorSpec("F32", tensor.shape) for name, tensor in tensors.items()}
        with TensorWriter(Path(directory) / FILE, spec) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        return writer.record

    def states(self, states: Array, behind_norm: Sequence[bool]) -> Array:
        """The engine's states [rows, places, hidden_size] float32 in the source's basis; behind_norm: of each place, whether it is
        behind the final norm."""
        if self.rotation is None:
            return states
        found = states @ self.rotation.T
        found[:, list(behind_norm)] *= self.norm
        return found

    def embeddings(self, rows: Array) -> Array:
        """The engine's embeddings [rows, hidden_size] float32 in the source's basis."""
        return rows if self.rotation is None else rows @ self.rotation.T

    def for_head(self, states: Array) -> Array:
        """States [rows, hidden_size] float32 behind the source's final norm, as the engine's head reads them."""
        if self.rotation is None:
            return states
        zero = self.norm == 0
        return states / (self.norm + zero) * ~zero @ self.rotation
