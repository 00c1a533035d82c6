"""What the bindings of a plan point to, allocated once: the inputs of a pass, its outputs, and the slots of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.engines.tree_mask import depths, visible_rows
from quasar_trt.model_config import ModelConfig

_ALIGNMENT = 256  # bytes: TensorRT wants addresses at multiples of them
_SHORTEST_SPAN = 256

# Slot of a pass -> (its new rows, the parents of the last of them, which are a tree, as `Draft.parents` has them).
Trees = Mapping[int, tuple[int, Sequence[int]]]


@dataclass(frozen=True)
class PassShape:
    """All that the bindings of a pass depend on.

    first_slot, batch: the window of slots. rows: of each slot. wanted: rows with logits. span: tokens of a slot that
    attention reads.
    """

    first_slot: int
    batch: int
    rows: int
    wanted: int
    span: int

    def profile(self, sizes: PlanSizes) -> int:
        """The number of the optimization profile that it belongs to."""
        return next(
            number
            for number, most in enumerate(sizes.profiles)
            if self.batch <= most.batch and self.rows <= most.rows and self.wanted <= most.wanted
        )

    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Sizes of the inputs, but for caches and the span."""
        rows = (self.batch, self.rows)
        return {
            bindings.INPUT_IDS: rows,
            bindings.POSITIONS: rows,
            bindings.PAST_LENGTHS: (self.batch,),
            bindings.LOGITS_ROWS: (self.wanted,),
            bindings.VISIBLE: (self.batch, 1, self.rows, self.rows + 2),
        }


class PlanMemory:
    """dtype: of an output or a cache, by the name of its binding. slot_bytes: of a slot's keys and values."""

    def __init__(self, device: CudaDevice, config: ModelConfig, sizes: PlanSizes, dtype: Callable[[str], torch.dtype]):
        self._device = device
        self._sizes = sizes
        most = sizes.largest
        passes = [PassShape(0, each.batch, each.rows, each.wanted, 0).inputs() for each in sizes.profiles]
        self._starts, size = {}, 0  # bytes
        for name in passes[0]:
            self._starts[name] = size
            itemsize = 1 if name == bindings.VISIBLE else torch.int32.itemsize
            nbytes = max(math.prod(shapes[name]) for shapes in passes) * itemsize
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._inputs = device.empty((size,), torch.uint8)
        self._host_inputs = device.pinned((size,), torch.uint8)
        logits = most.wanted, config.vocab_size
        self._logits = device.empty(logits, dtype(bindings.LOGITS))
        self._wide_logits = device.empty(logits, torch.float32)
        self._host_logits = device.pinned(logits, torch.float32)
        self._states = {
            place: device.empty((most.wanted, config.hidden_size), dtype(bindings.state_binding(place)))
            for place in bindings.state_places(config)
        }
        self._wide_states = device.empty((most.wanted, config.hidden_size), torch.float32)
        self._kept: dict[int, torch.Tensor] = {}  # place -> its states on the host
        names = [names for i in range(config.num_hidden_layers) for names in bindings.cache_bindings(i)]
        slots = (most.batch, config.num_key_value_heads, sizes.capacity, config.head_size)
        self._cache = device.empty((len(names), *slots), dtype(names[0][0]))
        self._caches = dict(zip(names, self._cache, strict=True))
        self.slot_bytes = self._cache[:, 0].nbytes
        self._moves = device.empty((3, most.wanted), torch.int64)
        self._host_moves = device.pinned((3, most.wanted), torch.int64)

    def send(
        self, first_slot: int, ids: np.ndarray, past_lengths: np.ndarray, wanted: Sequence[int], trees: Trees
    ) -> PassShape:
        """Sends the inputs of a pass to the device, as `PlanSession.run` takes them."""
        batch, rows = ids.shape
        # A verify pass has logits of all rows, so that its shape does not depend on how long the drafts are.
        logits_rows = np.zeros(ids.size if rows <= self._sizes.verify.rows else max(1, len(wanted)), np.int32)
        logits_rows[: len(wanted)] = wanted
        positions = past_lengths[:, None] + np.arange(rows, dtype=np.int32)
        visible = np.zeros((batch, rows, rows + 2), bool)
        visible[:, :, 0] = True
        visible[:, :, 1:-1] = visible_rows(rows)
        for slot, (count, parents) in trees.items():
            seen = visible_rows(count, parents)
            positions[slot, :count] = past_lengths[slot] + depths(seen)
            visible[slot, :count, 1 : count + 1] = seen
        self._device.wait()  # a pass that was interrupted may still read what it was sent
        host = self._host_inputs.numpy()
        for start, array in zip(
            self._starts.values(), (ids, positions, past_lengths, logits_rows, visible), strict=True
        ):
            end = start + array.nbytes
            host[start:end] = np.ascontiguousarray(array).view(np.uint8).ravel()
        self._device.copy(self._inputs[:end], self._host_inputs[:end])
        span = _span(int(past_lengths.max()) + rows, self._sizes.capacity)
        return PassShape(first_slot, batch, rows, len(logits_rows), span)

    def receive(self, count: int, rows: int) -> np.ndarray:
        """Waits for the pass, of so many rows; its first `count` rows of logits, float32 [count, vocab], valid until the next `receive`."""
        if count:
            self._device.copy(self._wide_logits[:count], self._logits[:count])
            self._device.copy(self._host_logits[:count], self._wide_logits[:count])
        wide = self._wide_states[:rows]
        for place, host in self._kept.items():
            self._device.copy(wide, self._states[place][:rows])
            self._device.copy(host[:rows], wide)
        self._device.wait()
        return self._host_logits[:count].numpy()

    def keep_states(self, places: Sequence[int]) -> None:
        """Which states of every pass come to the host from now on, of the places that the plan gives."""
        shape = tuple(self._wide_states.shape)
        self._kept = {place: self._device.pinned(shape, torch.float32) for place in places}

    def states(self, place: int, rows: int) -> np.ndarray:
        """Of the first rows of the last pass, float32 [rows, hidden_size], valid until the next."""
        return self._kept[place][:rows].numpy()

    def inputs(self, shape: PassShape) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """(binding, its shape, its address) of every input on the device."""
        for name, sizes in shape.inputs().items():
            yield name, sizes, self._inputs[self._starts[name] :].data_ptr()
        for (past, _), cache in self._caches.items():
            slots = cache[shape.first_slot : shape.first_slot + shape.batch]
            yield past, tuple(slots.shape), slots.data_ptr()

    def outputs(self, shape: PassShape) -> Iterator[tuple[str, int]]:
        """(binding, its address) of every output; caches are updated in place."""
        yield bindings.LOGITS, self._logits.data_ptr()
        for place, states in self._states.items():
            yield bindings.state_binding(place), states.data_ptr()
        for (_, present), cache in self._caches.items():
            yield present, cache[shape.first_slot].data_ptr()

    def clear(self, slot: int) -> None:
        """Zeros in a slot: what attention masks has weight 0, and 0 times NaN would be NaN."""
        self._device.zero(self._cache[:, slot])

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of a slot into another."""
        self._device.copy(self._cache[:, target, :, :length], self._cache[:, source, :, :length])

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Keys and values of tokens to other places of their slots, all at once: (slot, from, to)."""
        self._device.wait()  # moves that nothing followed may still be read
        self._host_moves.numpy()[:, : len(moves)] = np.transpose(moves)
        slots, sources, targets = self._moves[:, : len(moves)]
        self._device.copy(self._moves, self._host_moves)

        def work() -> None:
            self._cache[:, slots, :, targets] = self._cache[:, slots, :, sources]

        self._device.run(work)


def _span(length: int, capacity: int) -> int:
    """Twice as long each time, because TensorRT prepares itself for each shape of pass anew."""
    span = _SHORTEST_SPAN
    while span < length:
        span *= 2
    return min(span, capacity)
