"""What drafters use of a model that runs as a plan apart from its passes: its embedding and its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quasar_trt.checkpoint import EMBEDDING, HEAD
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import float32_of


class PlanHead:
    """The embedding is read from the mapped checkpoint; the head goes to the device when it is first used.

    tensors: of the checkpoint, by name, mapped. nbytes: of the device's memory that is taken.
    """

    def __init__(self, tensors: Mapping[str, Tensor], recipe: Recipe, device: CudaDevice):
        self.nbytes = 0
        self._device = device
        self._embedding = tensors[EMBEDDING]
        self._head = [(tensors[HEAD], torch.bfloat16)]  # which holds INT8 codes as they are
        if recipe.lm_head == "int8":
            self._head.append((tensors[f"{HEAD.removesuffix('.weight')}.per_channel_scale"].flatten(), torch.float32))
        self._weights: list[Tensor] = []

    def embeddings(self, ids: Sequence[int]) -> np.ndarray:
        """As `Engine.embeddings`."""
        return float32_of(self._embedding[list(ids)])

    def logits(self, states: np.ndarray) -> np.ndarray:
        """As `Engine.head_logits`, in BF16. Raises QuasarError where the device has no room for the head."""
        with self._device.use():
            self._weights = self._weights or self._on_device()
            weight, *scale = self._weights
            found = (torch.tensor(states, device=self._device.torch_device, dtype=weight.dtype) @ weight.T).float()
            for each in scale:
                found *= each
            return found.cpu().numpy()

    def _on_device(self) -> list[Tensor]:
        needed = sum(tensor.numel() * dtype.itemsize for tensor, dtype in self._head)
        free = self._device.free_memory()
        if needed > free:
            raise QuasarError(
                f"the drafter needs {needed / 1e9:.2f} GB on {self._device.name} beside the plan, {free / 1e9:.2f} GB are free; take "
                "another drafter, or build the engine with a smaller max_batch_size or max_seq_len"
            )
        self.nbytes += needed
        return [tensor.to(self._device.torch_device, dtype) for tensor, dtype in self._head]
