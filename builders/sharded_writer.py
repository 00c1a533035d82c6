"""Writes a checkpoint for any number of ranks, one whole tensor at a time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from quasar_trt.architectures import architecture_of
from quasar_trt.checkpoint import HEAD, below_layer, checkpoint_spec
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import rank_config
from quasar_trt.tensorfile import FileRecord, TensorWriter


class ShardedWriter:
    """`rank{r}.safetensors` of every rank in `directory`, an engine directory's `checkpoint`.

    Use as `TensorWriter`: a context manager whose `write` takes whole tensors in the order of
    `checkpoint_spec(config, recipe)`; each file gets its rank's part. Afterwards `records` tells the files, by path below
    the engine directory. Raises QuasarError for a tp_size that does not divide the model, ValueError as `TensorWriter`.
    """

    def __init__(self, directory: Path, config: ModelConfig, recipe: Recipe, tp_size: int = 1):
        self._directory = directory
        self._config = config
        self._tp_size = tp_size
        self._spec = checkpoint_spec(rank_config(config, tp_size), recipe)
        self._writers: list[TensorWriter] = []

    def write(self, name: str, tensor: Tensor) -> None:
        for rank, writer in enumerate(self._writers):
            writer.write(name, shard(name, tensor, self._config, self._tp_size, rank))

    @property
    def records(self) -> dict[str, FileRecord]:
        return {f"{self._directory.name}/{_file(rank)}": writer.record for rank, writer in enumerate(self._writers)}

    def __enter__(self) -> ShardedWriter:
        with ExitStack() as stack:
            for rank in range(self._tp_size):
                # Ranks have the same tensors: only the number in the header tells exchanged files from the right ones.
                writer = TensorWriter(self._directory / _file(rank), self._spec, {"rank": str(rank)})
                self._writers.append(stack.enter_context(writer))
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self._open.__exit__(kind, value, traceback)


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def shard(name: str, tensor: Tensor, config: ModelConfig, tp_size: int, rank: int) -> Tensor:
    """The part of checkpoint tensor `name` that one rank holds, as TensorRT-LLM splits it; where it can be, a view.

    tensor: whole, of the shape that `checkpoint_spec(config, recipe)` declares; `config` is the whole model's. A linear
    that reads a norm is split by output rows (weight, scale and bias; q, k and v each, then fused again), one with an
    explicit smoother by columns (weight and smoother). The scale and the bias of the latter are whole on every rank: the
    scale belongs to partial sums of the same row, and the bias is added once, to the sum over ranks.
    """
    stem, _, kind = name.rpartition(".")
    dim = 1 if kind == "per_channel_scale" else 0  # where the output rows are
    if f"{stem}.weight" == HEAD:
        size = rank_config(config, tp_size).logits_size
        return _padded_part(tensor, dim, size, rank, filler=0 if kind == "weight" else 1)
    linears = {linear.name: linear for linear in architecture_of(config).linears}
    linear = linears.get(below_layer(stem))
    if linear is None or kind == "act_scale":  # embedding and norms, and a scale of the whole input
        return tensor
    if linear.norm is None:
        return tensor.chunk(tp_size, dim=1)[rank] if kind in ("weight", "smoother") else tensor
    parts = tensor.split([rows(config) for rows in linear.sources.values()], dim)
    return torch.cat([part.chunk(tp_size, dim)[rank] for part in parts], dim)


def _padded_part(tensor: Tensor, dim: int, size: int, rank: int, filler: int) -> Tensor:
    """Part `rank` of the parts of `size` along `dim`; beyond the end of the tensor they hold `filler`."""
    begin = min(rank * size, tensor.shape[dim])
    part = tensor.narrow(dim, begin, min(size, tensor.shape[dim] - begin))
    missing = list(part.shape)
    missing[dim] = size - part.shape[dim]
    return torch.cat([part, part.new_full(missing, filler)], dim) if missing[dim] else part
