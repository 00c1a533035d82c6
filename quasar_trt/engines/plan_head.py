"""The embedding and the head of a model that runs as a plan, apart from its passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor, bfloat16, from_numpy

from quasar_trt.checkpoint import EMBEDDING, HEAD
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.engines.source_basis import SourceBasis
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe


class PlanHead:
    """What `Engine.embeddings` and `Engine.head_logits` give, and the basis that hidden states are read in.

    tensors: of the checkpoint, by name, mapped. The embedding stays there; the head goes to the device, with BF16 values, when it is
    first asked for. nbytes: that it takes there.
    """

    def __init__(self, tensors: Mapping[str, Tensor], recipe: Recipe, basis: SourceBasis, device: CudaDevice):
        self.basis = basis
        self.nbytes = 0
        self._embedding = tensors[EMBEDDING]
        self._weight = tensors[HEAD]
        self._scale = tensors[f"{HEAD.removesuffix('.weight')}.per_channel_scale"] if recipe.lm_head == "int8" else None
        self._device = device

    def embeddings(self, ids: Sequence[int]) -> np.ndarray:
        return self.basis.embeddings(self._embedding[list(ids)].float().numpy())

    def logits(self, states: np.ndarray) -> np.ndarray:
        """Computed in BF16. Raises QuasarError where the device has no room for the head."""
        rows = from_numpy(self.basis.for_head(states))
        with self._device.use():
            self._load()
            found = (rows.to(self._weight) @ self._weight.T).float()
            if self._scale is not None:
                found *= self._scale
            return found.cpu().numpy()

    def _load(self) -> None:
        if self.nbytes:
            return
        needed, free = self._weight.numel() * bfloat16.itemsize, self._device.free_memory()
        if needed > free:
            raise QuasarError(
                f"the drafter reads the model's head, which needs {needed / 1e9:.2f} GB on {self._device.name} beside the plan, "
                f"{free / 1e9:.2f} GB are free; take another drafter, or build the engine with less than its max_batch_size or max_seq_len"
            )
        on_device = self._device.torch_device
        self._weight = self._weight.to(on_device, bfloat16)  # which holds INT8 codes as they are
        if self._scale is not None:
            self._scale = self._scale.flatten().to(on_device)
        self.nbytes = needed
