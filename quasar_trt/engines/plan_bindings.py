"""The bindings of a TensorRT plan and the sizes they take: the contract between its builder and its runtime.

A pass holds `batch` neighbouring slots of the KV cache with `rows` rows each, padded at the end. The keys and values of the
rows are written behind what a slot holds, so those of padding are junk behind its end, which the next pass overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass

from quasar_trt.manifest import Limits
from quasar_trt.model_config import ModelConfig

INPUT_IDS = "input_ids"  # int32 [batch, rows]
POSITIONS = "positions"  # int32 [batch, rows]
PAST_LENGTHS = "past_lengths"  # int32 [batch]: tokens that a slot holds before the pass
KEY_VALUE_LENGTHS = "key_value_lengths"  # int32 [batch]: past length + rows
SPAN = "span"  # int64 [1] in host memory: the largest of the lengths above, what attention reads of every slot
LOGITS_ROWS = "logits_rows"  # int32 [wanted]: which of the batch * rows rows have logits
LOGITS = "logits"  # [wanted, vocab], of the whole vocabulary on every rank


def cache_bindings(layer: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """(input, output) of keys and of values, each [batch, kv heads, capacity, head_size]; both are the same memory."""
    return tuple((f"past_{kind}.{layer}", f"{kind}.{layer}") for kind in ("keys", "values"))


@dataclass(frozen=True)
class PassSizes:
    """Slots, rows of a slot (with padding) and rows with logits of a pass."""

    batch: int
    rows: int
    wanted: int


@dataclass(frozen=True)
class PlanSizes:
    """What limits and the rows of a prefill chunk make of the bindings."""

    limits: Limits
    prefill_rows: int

    @property
    def capacity(self) -> int:
        """Tokens of a slot: the last rows of a pass may be padding behind the longest sequence. A multiple of 64, so that slots
        begin at multiples of 256 bytes, as TensorRT wants addresses."""
        return -(-(self.limits.max_seq_len + self.limits.max_draft_len + 1) // 64) * 64

    def cache_bytes(self, config: ModelConfig) -> int:
        """Of the keys and values of all slots, BF16, of one rank's `config`."""
        slot = config.num_key_value_heads * self.capacity * config.head_size
        return 2 * 2 * config.num_hidden_layers * self.limits.max_batch_size * slot

    @property
    def verify(self) -> PassSizes:
        """The usual pass: every slot with a token and its draft."""
        rows = self.limits.max_draft_len + 1
        return PassSizes(self.limits.max_batch_size, rows, self.limits.max_batch_size * rows)

    @property
    def profiles(self) -> tuple[PassSizes, ...]:
        """The largest pass of each optimization profile of a plan that has several: verifying in one slot, verifying in all, and a
        chunk of a prompt. A pass belongs to the first that holds it."""
        rows = self.verify.rows
        sizes = [PassSizes(1, rows, rows), self.verify]
        if self.prefill_rows > rows:
            sizes.append(PassSizes(1, self.prefill_rows, self.prefill_rows))
        return tuple(dict.fromkeys(sizes))

    @property
    def largest(self) -> PassSizes:
        """The bounds of all passes: of `verify`, and of a chunk of a prompt in one slot without padding."""
        rows = max(self.verify.rows, self.prefill_rows)
        return PassSizes(self.verify.batch, rows, max(self.verify.wanted, self.prefill_rows))
