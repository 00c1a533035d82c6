"""What the bindings of a plan point to, allocated once: the inputs of a pass, its logits, and the slots of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.cuda_device import CudaDevice
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.model_config import ModelConfig

_ALIGNMENT = 64  # int32 values: TensorRT wants addresses at multiples of 256 bytes
_SHORTEST_SPAN = 256


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


class PlanMemory:
    """dtype: of a binding that is not int32."""

    def __init__(self, device: CudaDevice, config: ModelConfig, sizes: PlanSizes, dtype: Callable[[str], torch.dtype]):
        self._device = device
        self._sizes = sizes
        most = sizes.largest
        rows = most.batch * most.rows
        lengths = {
            bindings.INPUT_IDS: rows,
            bindings.POSITIONS: rows,
            bindings.PAST_LENGTHS: most.batch,
            bindings.KEY_VALUE_LENGTHS: most.batch,
            bindings.LOGITS_ROWS: most.wanted,
        }
        self._starts, size = {}, 0
        for name, length in lengths.items():
            self._starts[name] = size
            size += -(-length // _ALIGNMENT) * _ALIGNMENT
        self._inputs = device.empty((size,), torch.int32)
        self._host_inputs = device.pinned((size,), torch.int32)
        logits = most.wanted, config.vocab_size
        self._logits = device.empty(logits, dtype(bindings.LOGITS))
        self._wide_logits = device.empty(logits, torch.float32)
        self._host_logits = device.pinned(logits, torch.float32)
        slots = (most.batch, config.num_key_value_heads, sizes.capacity, config.head_size)
        self._caches = {
            names: device.empty(slots, dtype(names[0]))
            for i in range(config.num_hidden_layers)
            for names in bindings.cache_bindings(i)
        }
        self.slot_bytes = sum(cache[0].nbytes for cache in self._caches.values())

    def send(self, first_slot: int, ids: np.ndarray, past_lengths: np.ndarray, wanted: Sequence[int]) -> PassShape:
        """Sends the inputs of a pass to the device, as `PlanSession.run` takes them."""
        batch, rows = ids.shape
        # A verify pass has logits of all rows, so that its shape does not depend on how long the drafts are.
        logits_rows = np.zeros(ids.size if rows <= self._sizes.verify.rows else max(1, len(wanted)), np.int32)
        logits_rows[: len(wanted)] = wanted
        inputs = {
            bindings.INPUT_IDS: ids,
            bindings.POSITIONS: past_lengths[:, None] + np.arange(rows, dtype=np.int32),
            bindings.PAST_LENGTHS: past_lengths,
            bindings.KEY_VALUE_LENGTHS: past_lengths + np.int32(rows),
            bindings.LOGITS_ROWS: logits_rows,
        }
        self._device.wait()  # a pass that was interrupted may still read what it was sent
        host = self._host_inputs.numpy()
        for name, array in inputs.items():
            start = self._starts[name]
            host[start : start + array.size] = array.ravel()
        self._device.copy(self._inputs, self._host_inputs)
        span = _span(int(past_lengths.max()) + rows, self._sizes.capacity)
        return PassShape(first_slot, batch, rows, len(logits_rows), span)

    def receive(self, count: int) -> np.ndarray:
        """Waits for the pass; its first rows of logits, float32 [count, vocab], valid until the next `receive`."""
        if count:
            self._device.copy(self._wide_logits[:count], self._logits[:count])
            self._device.copy(self._host_logits[:count], self._wide_logits[:count])
        self._device.wait()
        return self._host_logits[:count].numpy()

    def inputs(self, shape: PassShape) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """(binding, its shape, its address) of every input on the device."""
        rows = (shape.batch, shape.rows)
        sizes = {
            bindings.INPUT_IDS: rows,
            bindings.POSITIONS: rows,
            bindings.PAST_LENGTHS: (shape.batch,),
            bindings.KEY_VALUE_LENGTHS: (shape.batch,),
            bindings.LOGITS_ROWS: (shape.wanted,),
        }
        for name, start in self._starts.items():
            yield name, sizes[name], self._inputs[start:].data_ptr()
        for (past, _), cache in self._caches.items():
            slots = cache[shape.first_slot : shape.first_slot + shape.batch]
            yield past, tuple(slots.shape), slots.data_ptr()

    def outputs(self, shape: PassShape) -> Iterator[tuple[str, int]]:
        """(binding, its address) of every output; caches are updated in place."""
        yield bindings.LOGITS, self._logits.data_ptr()
        for (_, present), cache in self._caches.items():
            yield present, cache[shape.first_slot].data_ptr()

    def clear(self, slot: int) -> None:
        """Zeros in a slot: what attention masks has weight 0, and 0 times NaN would be NaN."""
        for cache in self._caches.values():
            self._device.zero(cache[slot])

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of a slot into another."""
        for cache in self._caches.values():
            self._device.copy(cache[target, :, :length], cache[source, :, :length])


def _span(length: int, capacity: int) -> int:
    """Twice as long each time, because TensorRT prepares itself for each shape of pass anew."""
    span = _SHORTEST_SPAN
    while span < length:
        span *= 2
    return min(span, capacity)
