"""From the basis that an engine computes in to that of its source model, in which drafting heads were trained, and back.

With Q the rotation of an engine's residual stream and w the weight of the source's final norm, which the engine's head carries,
a state x Q between layers is x in the source, and a state y Q behind the final norm is y * w.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import FileRecord, TensorSpec, TensorWriter, map_tensors

FILE = "basis.safetensors"  # of an engine directory, where the engine is rotated


@dataclass(frozen=True)
class SourceBasis:
    """rotation: Q float32 [hidden_size, hidden_size]; norm: w float32 [hidden_size]; both None where the bases are one."""

    rotation: np.ndarray | None = None
    norm: np.ndarray | None = None

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

    def to_source(self, behind_norm: bool = False) -> np.ndarray | None:
        """T float32 [hidden_size, hidden_size]: a state s of the engine, behind the final norm or not, is T s in the source, and a linear
        W that reads the source's states reads the engine's as W T. None where the bases are one."""
        if self.rotation is None:
            return None
        return self.norm[:, None] * self.rotation if behind_norm else self.rotation

    def for_head(self) -> np.ndarray | None:
        """The same the other way, for states behind the final norm: as the engine's head reads them."""
        if self.rotation is None:
            return None
        return np.divide(self.rotation.T, self.norm, out=np.zeros_like(self.rotation), where=self.norm != 0)
