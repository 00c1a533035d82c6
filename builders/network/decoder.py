"""The decoder of every supported architecture as a network; bindings as `quasar_trt.engines.plan_bindings` says.

The residual stream, norms, RoPE and the product inside of the MLP are float32. What linears and attention read and write,
the keys and values in the cache, the hidden states that are given and the logits are `dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from quasar_trt.architectures import architecture_of
from quasar_trt.builders.network.lowering import lowering_of
from quasar_trt.builders.network.writer import NetworkWriter
from quasar_trt.checkpoint import EMBEDDING, HEAD, LAYER_PREFIX
from quasar_trt.engines import plan_bindings as bindings
from quasar_trt.engines.cpu_layout import HEAD_ROWS
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.rope import rope_tables


class DecoderNetwork:
    """Writes a decoder of `capacity` tokens per slot with `writer`, once.

    config: of one rank. tensors: its own, by checkpoint name as `checkpoint_spec(config, recipe)` says and of a rescored head as
    `with_int8_head` does, numpy, uint16 for the bits of bfloat16; the network refers to their memory. dtype: "bfloat16" or
    "float32". Every rank gives the logits of the whole vocabulary.
    """

    def __init__(
        self,
        writer: NetworkWriter,
        config: ModelConfig,
        recipe: Recipe,
        tensors: Mapping[str, np.ndarray],
        capacity: int,
        dtype: str = "bfloat16",
    ):
        self.writer = writer
        self.config = config
        self.recipe = recipe
        tied = config.tie_word_embeddings and not recipe.rotate and config.tp_size == 1
        rows = HEAD_ROWS if recipe.lm_head == "rescored" else HEAD
        if tied and tensors[rows].dtype == tensors[EMBEDDING].dtype:  # one constant is both
            tensors = {**tensors, rows: tensors[EMBEDDING]}
        self.tensors = tensors
        self.capacity = capacity
        self.dtype = dtype
        self.linears = lowering_of(recipe, writer.takes_plugins)(writer, config, recipe, tensors, dtype)

    def write(self) -> None:
        writer = self.writer
        ids = writer.input(bindings.INPUT_IDS, "int32", (-1, -1))
        positions = writer.input(bindings.POSITIONS, "int32", (-1, -1))
        self._past_lengths = writer.input(bindings.PAST_LENGTHS, "int32", (-1,))
        self._span = writer.input(bindings.SPAN, "int64", (1,))
        wanted = writer.input(bindings.LOGITS_ROWS, "int32", (-1,))
        visible = writer.input(bindings.VISIBLE, "bool", (-1, 1, -1, -1))
        batch_and_rows = writer.shape(ids)
        heads = self.config.num_attention_heads + 2 * self.config.num_key_value_heads
        self._sizes = writer.head_sizes(batch_and_rows, heads, self.config.head_size)
        tables = map(np.ascontiguousarray, rope_tables(self.config, self.capacity))
        self._cos, self._sin = (writer.gather(writer.constant(table), positions) for table in tables)
        self._visible = writer.gather_columns(visible, self._columns(batch_and_rows))

        embedding = writer.constant(self.tensors[EMBEDDING])
        x = writer.reshape(writer.gather(embedding, ids), (-1, self.config.hidden_size))
        x = writer.cast(x, "float32")
        places = bindings.state_places(self.config)
        for i in range(self.config.num_hidden_layers):
            if i in places:
                writer.output(bindings.state_binding(i), writer.cast(x, self.dtype))
            x = self._layer(i, x)
        if self.config.num_hidden_layers in places:
            writer.output(bindings.state_binding(self.config.num_hidden_layers), self.linears.final_states(x))
        writer.output(bindings.LOGITS, self.linears.head(writer.gather(x, wanted)))

    def _columns(self, batch_and_rows):
        """The column of the input `visible` that each key of a slot belongs to, int32 [batch, span]."""
        writer = self.writer
        zero, one = (writer.constant(np.full((1, 1), value, np.int32)) for value in (0, 1))
        keys = writer.first_rows(writer.constant(np.arange(self.capacity, dtype=np.int32)[:, None]), self._span)
        new = writer.subtract(writer.reshape(keys, (1, -1)), writer.reshape(self._past_lengths, (-1, 1)))
        behind = writer.add(writer.size(batch_and_rows, 1), one)
        return writer.smaller(writer.larger(writer.add(new, one), zero), behind)

    def _layer(self, i: int, x):
        """x float32 [batch * rows, hidden_size] -> the same."""
        linears, prefix = self.linears, LAYER_PREFIX.format(i=i)
        qkv = linears.linear(
            f"{prefix}attention.qkv", linears.norm(f"{prefix}input_layernorm", x, f"{prefix}attention.qkv")
        )
        attended = linears.smooth(self._attention(i, qkv), f"{prefix}attention.dense")
        x = self._residual(x, linears.summed_linear(f"{prefix}attention.dense", attended))
        normed = linears.norm(f"{prefix}post_layernorm", x, f"{prefix}mlp.fc")
        gate, up = linears.linear(f"{prefix}mlp.fc", normed), linears.linear(f"{prefix}mlp.gate", normed)
        activated = linears.silu_mul(gate, up, f"{prefix}mlp.proj")
        return self._residual(x, linears.summed_linear(f"{prefix}mlp.proj", activated))

    def _residual(self, x, y):
        return self.writer.add(x, self.writer.cast(y, "float32"))

    def _attention(self, i: int, qkv):
        """[batch * rows, qkv_size] -> [batch * rows, heads * head_size], the layer's caches updated."""
        writer, config = self.writer, self.config
        query_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads = writer.to_heads(qkv, self._sizes)
        rotated = self._rotated(i, writer.part(heads, 0, query_heads + kv_heads))
        queries = writer.part(rotated, 0, query_heads)
        queries = writer.multiply(queries, writer.scalar(1 / math.sqrt(config.head_size), 4))
        keys = writer.part(rotated, query_heads, kv_heads)
        values = writer.part(heads, query_heads + kv_heads, kv_heads)
        cached = []
        shape = (-1, kv_heads, self.capacity, config.head_size)
        for (past, present), update in zip(bindings.cache_bindings(i), (keys, values), strict=True):
            cache = writer.input(past, self.dtype, shape)
            updated = writer.update_cache(cache, writer.cast(update, self.dtype), self._past_lengths)
            writer.output(present, updated)
            cached.append(updated)
        # Without the cut TensorRT-RTX copies the whole capacity, once per query head, before it attends. It copies what is cut in
        # one kernel, which joining asks for, instead of in two.
        cut = writer.first_rows(writer.join_heads(cached), self._span)
        keys, values = (writer.part(cut, first, kv_heads) for first in (0, kv_heads))
        attended = writer.attention(writer.cast(queries, self.dtype), keys, values, self._visible)
        return writer.from_heads(attended, config.attention_size)

    def _rotated(self, i: int, x):
        """RoPE of the heads of q and k, float32, after the norms over each where the architecture has them."""
        norms = [f"{LAYER_PREFIX.format(i=i)}{norm}.weight" for norm in architecture_of(self.config).head_norms]
        if norms:
            counts = self.config.num_attention_heads, self.config.num_key_value_heads
            weights = [np.tile(self.tensors[norm], (count, 1)) for norm, count in zip(norms, counts, strict=True)]
            x = self.linears.rms_norm(x, np.concatenate(weights)[None, :, None])
        return self.writer.rotate(self.writer.cast(x, "float32"), self._cos, self._sin)
