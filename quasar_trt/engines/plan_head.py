"""What drafters read of a model that runs as a plan beside its logits: the basis of its states, its embedding and its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quasar_trt.checkpoint import EMBEDDING, HEAD
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.engines.source_basis import SourceBasis
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe


class PlanHead:
    """Computes on the device, where each part goes when it is first asked for. Methods raise QuasarError where it has no room there.

    tensors: of the checkpoint, by name, mapped; the embedding stays there. nbytes: of the device's memory that is taken.
    """

    def __init__(self, tensors: Mapping[str, Tensor], recipe: Recipe, basis: SourceBasis, device: CudaDevice):
        self.nbytes = 0
        self._device = device
        self._embedding = tensors[EMBEDDING]
        self._head = [(tensors[HEAD], torch.bfloat16)]  # which holds INT8 codes as they are
        if recipe.lm_head == "int8":
            self._head.append((tensors[f"{HEAD.removesuffix('.weight')}.per_channel_scale"].flatten(), torch.float32))
        self._weights: list[Tensor] = []
        self._basis = basis
        self._has_basis = basis.rotation is None

    def load_basis(self) -> None:
        """That of the source goes to the device, where it is another than the engine's."""
        if not self._has_basis:
            arrays = self._basis.rotation, self._basis.norm
            self._basis = SourceBasis(*self._on_device([(torch.tensor(array), torch.float32) for array in arrays]))
            self._has_basis = True

    def states(self, states: Tensor, behind_norm: bool) -> Tensor:
        """[rows, hidden_size] of a place on the device, as it is there after `load_basis`, -> float32 in the basis of the source."""
        turned = self._basis.embeddings(states.float())
        return turned * self._basis.norm if behind_norm and self._basis.norm is not None else turned

    def embeddings(self, ids: Sequence[int]) -> np.ndarray:
        """As `Engine.embeddings`."""
        with self._device.use():
            self.load_basis()
            rows = self._embedding[list(ids)].float().to(self._device.torch_device)
            return self._basis.embeddings(rows).cpu().numpy()

    def logits(self, states: np.ndarray) -> np.ndarray:
        """As `Engine.head_logits`, in BF16."""
        with self._device.use():
            self.load_basis()
            self._weights = self._weights or self._on_device(self._head)
            weight, *scale = self._weights
            rows = self._basis.for_head(torch.tensor(states, device=self._device.torch_device))
            found = (rows.to(weight.dtype) @ weight.T).float()
            for each in scale:
                found *= each
            return found.cpu().numpy()

    def _on_device(self, parts: Sequence[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
        needed = sum(tensor.numel() * dtype.itemsize for tensor, dtype in parts)
        free = self._device.free_memory()
        if needed > free:
            raise QuasarError(
                f"the drafter needs {needed / 1e9:.2f} GB on {self._device.name} beside the plan, {free / 1e9:.2f} GB are free; take "
                "another drafter, or build the engine with a smaller max_batch_size or max_seq_len"
            )
        self.nbytes += needed
        return [tensor.to(self._device.torch_device, dtype) for tensor, dtype in parts]
