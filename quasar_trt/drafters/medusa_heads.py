"""Medusa's heads (Cai et al., arXiv 2401.10774): each guesses, from the verifier's last hidden state, the token so many places on.

The format is that of FasterDecoding's Medusa: head i is `medusa_num_layers` residual blocks, x + silu(linear(x)), and a linear to the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quasar_trt.drafters.draft_linear import DraftLinears, silu
from quasar_trt.drafters.head_files import check_shapes, read_config, read_weights
from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import whole_number

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "medusa_head."


class MedusaHeads:
    """The heads in `directory` for an engine's model. Heads that end in equal linears have one in common, which is read once.

    Raises QuasarError for another model's heads, and for files that are no heads.
    """

    def __init__(self, directory: Path, engine: Engine, linears: DraftLinears):
        import torch

        hidden_size, vocab_size = engine.config.hidden_size, engine.config.vocab_size
        config = read_config(directory)
        sizes = [config.get(f"medusa_num_{what}") for what in ("heads", "layers")]
        try:
            num_heads, num_layers = (
                whole_number("medusa_num_heads", sizes[0]),
                whole_number("medusa_num_layers", sizes[1], least=0),
            )
        except QuasarError as error:
            raise QuasarError(f"{directory / 'config.json'}: {error}") from None
        found, path = read_weights(directory)
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in found.items()}
        # There are published files with more heads than their configuration says, and all of them are trained.
        while any(name.startswith(f"{num_heads}.") for name in tensors):
            num_heads += 1
        self.num_heads = num_heads
        expected: dict[str, tuple[int, ...]] = {}
        for i in range(self.num_heads):
            for layer in range(num_layers):
                expected[f"{i}.{layer}.linear.weight"] = (hidden_size, hidden_size)
                expected[f"{i}.{layer}.linear.bias"] = (hidden_size,)
            expected[f"{i}.{num_layers}.weight"] = (vocab_size, hidden_size)
        check_shapes(tensors, expected, {}, path)
        basis = engine.source_basis.to_source(behind_norm=True)
        self._to_source = None if basis is None else linears(torch.tensor(basis))
        self._blocks = [
            [
                linears(tensors[f"{i}.{layer}.linear.weight"], tensors[f"{i}.{layer}.linear.bias"])
                for layer in range(num_layers)
            ]
            for i in range(self.num_heads)
        ]
        last = [tensors[f"{i}.{num_layers}.weight"] for i in range(self.num_heads)]
        self._groups = [(group, linears(last[group[0]])) for group in _equal(last)]

    def __call__(self, states: np.ndarray) -> list[np.ndarray]:
        """Logits [rows, vocab] float32 of each head, from the engine's states [rows, hidden_size] behind the final norm."""
        states = self._to_source(states) if self._to_source else states
        rows = []
        for blocks in self._blocks:
            x = states
            for block in blocks:
                x = x + silu(block(x))
            rows.append(x)
        logits: dict[int, np.ndarray] = {}
        for group, linear in self._groups:
            together = linear(np.concatenate([rows[i] for i in group]))
            logits.update(zip(group, np.split(together, len(group)), strict=True))
        return [logits[i] for i in range(self.num_heads)]


def _equal(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of equal tensors, together."""
    groups: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        group = next((group for group in groups if tensors[group[0]].equal(tensor)), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups
