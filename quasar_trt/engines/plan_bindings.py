"""The bindings of a TensorRT plan and the sizes they take: the contract between its builder and its runtime.

A pass holds `batch` neighbouring slots of the KV cache with `rows` rows each, padded at the end. The keys and values of the
rows are written behind what a slot holds, so those of padding are junk behind its end, which the next pass overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass

from quasar_trt.drafters.head_files import eagle3_places
from quasar_trt.manifest import Limits
from quasar_trt.model_config import ModelConfig

INPUT_IDS = "input_ids"  # int32 [batch, rows]
POSITIONS = "positions"  # int32 [batch, rows]: how many tokens come before a row, of a tree on its path
PAST_LENGTHS = "past_lengths"  # int32 [batch]: tokens that a slot holds before the pass
SPAN = "span"  # int64 [1] in host memory: tokens of a slot that attention reads, no fewer than the largest past length + rows
LOGITS_ROWS = "logits_rows"  # int32 [wanted]: which of the batch * rows rows have logits
# bool [batch, 1, rows, rows + 2]: whether a row sees what its slot holds before the pass, each of the new rows, what is behind them
VISIBLE = "visible"
LOGITS = "logits"  # [wanted, vocab], of the whole vocabulary on every rank


def cache_bindings(layer: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """(input, output) of keys and of values, each [batch, kv heads, capacity, head_size]; both are the same memory."""
    return tuple((f"past_{kind}.{layer}", f"{kind}.{layer}") for kind in ("keys", "values"))


def state_places(config: ModelConfig) -> tuple[int, ...]:
    """The places whose hidden states a plan of one rank's `config` gives, counted as `Engine.keep_hidden_states` does: those that published
    heads read, three between the layers of a model that has seven (EAGLE-3) and behind the final norm. None of several ranks."""
    layers = config.num_hidden_layers
    if config.tp_size > 1:
        return ()
    return (*eagle3_places(layers), layers)


def state_binding(place: int) -> str:
    """[batch * rows, hidden_size], the states of a place as linears read them, in their dtype."""
    return f"hidden_states.{place}"


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

    def output_bytes(self, config: ModelConfig) -> int:
        """Of what a pass gives: logits and hidden states, BF16, and as float32 where they leave the device."""
        states = (2 * len(state_places(config)) + 4) * config.hidden_size
        return self.largest.wanted * (states + (2 + 4) * config.vocab_size)

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
