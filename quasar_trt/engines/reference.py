"""The reference engine: plain torch, with the Triton operations on CUDA; the oracle for every other engine.

Only weights and the KV cache are rounded to BF16; the residual stream, norms, attention and everything else stay in the
model's dtype. Row invariance holds up to float rounding, not bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quasar_trt.architectures import architecture_of, hadamard_blocks
from quasar_trt.checkpoint import LAYER_PREFIX, Checkpoint, below_layer
from quasar_trt.engines.base import Accept, Acceptance, Capabilities, Engine, SequenceStep, checked_acceptance
from quasar_trt.engines.reference_cache import KVCache
from quasar_trt.engines.source_basis import SourceBasis
from quasar_trt.engines.tree_mask import depths, visible_rows
from quasar_trt.errors import QuasarError
from quasar_trt.machine import missing
from quasar_trt.manifest import Manifest
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins import reference as ops
from quasar_trt.recipe import RESCORED, Recipe
from quasar_trt.rope import rope_tables
from quasar_trt.tensor_parallel import check_ranks
from quasar_trt.tensorfile import map_tensors

Observe = Callable[[str, Tensor], None]


def operations_for(device: torch.device) -> ModuleType:
    """The quantized operations for tensors of a device: a module with the names of `quasar_trt.plugins.reference`. Raises
    QuasarError where those for CUDA lack Triton."""
    if device.type != "cuda":
        return ops
    try:
        from quasar_trt.plugins import triton
    except ImportError as error:
        raise QuasarError(f"device is {device}; its operations need Triton: {error}; {missing('triton')}") from None
    return triton


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file as a view of one memory map (read-only: never write to them)."""
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, array in map_tensors(path).items():
            is_bf16 = array.dtype == np.uint16
            tensors[name] = torch.from_numpy(array.view(np.int16) if is_bf16 else array)
            if is_bf16:
                tensors[name] = tensors[name].view(torch.bfloat16)
    return tensors


Batch = Sequence[tuple[Sequence[int], KVCache]]  # new ids of a sequence, and what it has cached
# Of each sequence of a batch: the parents of its last new ids where they are a tree (see `Draft.parents`), else empty.
Parents = Sequence[Sequence[int]]


class ReferenceModel:
    """A decoder in plain torch.

    tensors: by checkpoint name, as `checkpoint_spec(config, recipe)` names them; unquantized ones may be BF16 or FP32
        (another dtype than `dtype` is converted at every use: give FP32 where speed matters more than memory).
    observe: called as observe(name, x) with the float input x [rows, in_features] of every linear of the layers before it
        is quantized; name is the checkpoint name without ".weight".
    blocks: columns of Hadamard blocks as `hadamard_blocks` gives them, the configuration's own when None.
    operations: of quantized linears, with the names of `quasar_trt.plugins.reference`; those for the tensors' device when None.
    """

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        observe: Observe | None = None,
        blocks: Mapping[str, int] | None = None,
        operations: ModuleType | None = None,
    ):
        self.config = config
        self.recipe = recipe
        self.dtype = dtype
        self.observe = observe
        self.tensors = tensors
        self.device = next(iter(tensors.values())).device
        self._blocks = hadamard_blocks(config, recipe) if blocks is None else blocks
        self._operations = operations_for(self.device) if operations is None else operations
        self._head_norms = bool(architecture_of(config).head_norms)
        self._cos = self._sin = torch.empty(0, config.head_size // 2, device=self.device)

    def new_cache(self, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache that stores `dtype`, or the model's own."""
        return KVCache(self.config, dtype or self.dtype, self.device)

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Logits [len(ids), vocab] float32 of one sequence from its start, the KV cache not rounded."""
        return self.logits(self.hidden_states([(ids, self.new_cache())]))

    @torch.no_grad()
    def hidden_states(
        self, batch: Batch, parents: Parents | None = None, kept: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """Runs the layers over new ids of several sequences, packed into rows one sequence after the other.

        Extends each cache by its ids. Returns the states after the final norm, [rows, hidden_size]. kept: gets the states that enter
        each layer that it names, and under the number of all layers those that are returned.
        """
        kept = {} if kept is None else kept
        x, rotations = self.embed(batch), self.rotations(batch, parents)
        trees = parents or [()] * len(batch)
        masks = [torch.from_numpy(visible_rows(len(ids), each)) for (ids, _), each in zip(batch, trees, strict=True)]
        for i in range(self.config.num_hidden_layers):
            if i in kept:
                kept[i] = x
            x = self.layer(i, x, batch, rotations, masks)
        x = self._norm("transformer.ln_f", x)
        if self.config.num_hidden_layers in kept:
            kept[self.config.num_hidden_layers] = x
        return x

    def embed(self, batch: Batch) -> Tensor:
        """The packed rows [rows, hidden_size] that enter the first layer."""
        return self.embeddings([token for tokens, _ in batch for token in tokens])

    def embeddings(self, ids: Sequence[int]) -> Tensor:
        """Rows [ids, hidden_size] of the embedding."""
        return self.tensors["transformer.vocab_embedding.weight"][torch.tensor(ids, device=self.device)].to(self.dtype)

    @torch.no_grad()
    def layer(
        self, i: int, x: Tensor, batch: Batch, rotations: tuple[Tensor, Tensor], masks: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Runs layer i over packed rows x [rows, hidden_size] and extends its part of each cache.

        masks: of each sequence, which new rows (columns) each new row sees, [rows, rows] bool; None for all up to itself.
        """
        prefix = LAYER_PREFIX.format(i=i)
        normed = self._norm(f"{prefix}input_layernorm", x)
        qkv = self._linear(f"{prefix}attention.qkv", normed)
        x = x + self._linear(f"{prefix}attention.dense", self._attention(i, qkv, rotations, batch, masks))
        normed = self._norm(f"{prefix}post_layernorm", x)
        gate, up = self._linear(f"{prefix}mlp.fc", normed), self._linear(f"{prefix}mlp.gate", normed)
        return x + self._linear(f"{prefix}mlp.proj", ops.silu_mul(gate, up).to(self.dtype))

    @torch.no_grad()
    def logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab] float32. An INT8 head reads 16-bit activations."""
        if self.recipe.lm_head != "int8":
            exact = functional.linear(hidden_states, self.tensors["lm_head.weight"].to(self.dtype)).float()
            if self.recipe.lm_head != "rescored":
                return exact
        q, scale = self._operations.quantize_16(hidden_states)
        logits = self._operations.w8a16_linear(q, scale, *self._int8_head)
        if self.recipe.lm_head == "rescored":
            best = logits.sort(dim=1, descending=True, stable=True).indices[:, :RESCORED]
            logits.scatter_(1, best, exact.gather(1, best))
        return logits

    @functools.cached_property
    def _int8_head(self) -> tuple[Tensor, Tensor]:
        """(codes int8 [vocab, hidden_size], scale float32 [vocab]); of a rescored head they follow from the BF16 rows."""
        weight = self.tensors["lm_head.weight"]
        return (
            ops.quantize_8(weight)
            if self.recipe.lm_head == "rescored"
            else (weight, self.tensors["lm_head.per_channel_scale"].flatten())
        )

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.tensors[f"{name}.weight"], self.config.norm_epsilon).to(self.dtype)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """[rows, in_features] -> [rows, out_features]; a smoother divides the input of the linears that have one."""
        if self.observe:
            self.observe(name, x)
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        if not self.recipe.quantizes(name):
            return functional.linear(x, weight.to(self.dtype), None if bias is None else bias.to(self.dtype))
        bits = self.recipe.activation_bits(name)
        smoother, block = self.tensors.get(f"{name}.smoother"), self._blocks.get(below_layer(name), 0)
        inverse = None if smoother is None else 1.0 / smoother.flatten()
        if self.recipe.is_static(name):
            y = x if inverse is None else ops.smooth(x, inverse, block)
            q, scale = ops.quantize_static(y, self.tensors[f"{name}.act_scale"])
        elif inverse is None:
            q, scale = self._operations.QUANTIZE[bits](x)
        else:
            q, scale = self._operations.smooth_quantize(x, inverse, block, bits)
        weight_scale = self.tensors[f"{name}.per_channel_scale"].flatten()
        return self._operations.LINEAR[bits](q, scale, weight, weight_scale, bias).to(self.dtype)

    def rotations(self, batch: Batch, parents: Parents | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of the packed rows, each [rows, 1, head_size / 2]; the tables grow as positions ask for it."""
        trees = parents or [()] * len(batch)
        found = [
            cache.length + depths(visible_rows(len(ids), each)) for (ids, cache), each in zip(batch, trees, strict=True)
        ]
        positions = torch.from_numpy(np.concatenate(found))
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            tables = rope_tables(self.config, 2 * needed)
            self._cos, self._sin = (torch.from_numpy(table).to(self.device) for table in tables)
        positions = positions.to(self.device)
        return self._cos[positions, None], self._sin[positions, None]

    def _attention(self, layer: int, qkv: Tensor, rotations, batch: Batch, masks: Sequence[Tensor] | None) -> Tensor:
        """Causal grouped-query attention of each sequence over its own cache: [rows, qkv_size] -> [rows, heads * head_size]."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = qkv.view(len(qkv), heads + 2 * kv_heads, self.config.head_size)
        queries, keys, values = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if self._head_norms:
            prefix = LAYER_PREFIX.format(i=layer)
            queries = self._norm(f"{prefix}attention.q_layernorm", queries)
            keys = self._norm(f"{prefix}attention.k_layernorm", keys)
        queries, keys = _rotate(queries, *rotations), _rotate(keys, *rotations)
        outputs = []
        counts = [len(tokens) for tokens, _ in batch]
        masks = masks or [torch.from_numpy(visible_rows(count)) for count in counts]
        split = zip(batch, queries.split(counts), keys.split(counts), values.split(counts), masks, strict=True)
        for (_, cache), q, k, v, mask in split:
            all_keys, all_values = cache.extend(layer, k.transpose(0, 1), v.transpose(0, 1))
            outputs.append(_attend(q, all_keys.to(self.dtype), all_values.to(self.dtype), mask.to(q.device)))
        return torch.cat(outputs)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + half]) of every head; x [rows, heads, head_size]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """queries [rows, heads, size] are the last rows of the sequence, and see of each other what `visible` [rows, rows] says;
    keys and values [kv heads, length, size]."""
    rows, heads, size = queries.shape
    kv_heads, length, _ = keys.shape
    queries = queries.view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)  # [kv, group, rows, size]
    scores = (queries @ keys[:, None].transpose(-1, -2)).float() / math.sqrt(size)
    scores[..., length - rows :].masked_fill_(~visible, -torch.inf)
    weights = scores.softmax(dim=-1).to(values.dtype)
    return (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(rows, heads * size)


class ReferenceEngine(Engine):
    """`ReferenceModel` behind the engine interface."""

    def __init__(
        self,
        model: ReferenceModel,
        *,
        max_seq_len: int,
        max_rows: int = 512,
        kv_dtype: torch.dtype = torch.bfloat16,
        basis: SourceBasis | None = None,
    ):
        """basis: of the source of a rotated model; without it there are no hidden states."""
        self.model = model
        self.config = model.config
        self.max_seq_len = max_seq_len
        self.source_basis = basis if model.recipe.rotate else SourceBasis()
        self._kept_layers: tuple[int, ...] = ()
        self._kept: tuple[Tensor, ...] = ()  # of each entry of the last pass: [rows, kept places, hidden_size]
        known = self.source_basis is not None
        self.capabilities = Capabilities(
            max_rows=max_rows, accepts_inside=False, tree=True, hidden_states=known, fork=True, exact=False
        )
        self.weight_bytes_per_step = sum(
            tensor.nbytes
            for name, tensor in model.tensors.items()
            if tensor.ndim == 2 and name.endswith(".weight") and name != "transformer.vocab_embedding.weight"
        )
        self._kv_dtype = kv_dtype
        self._caches: dict[int, KVCache] = {}
        self._handles = itertools.count()

    @classmethod
    def from_dir(
        cls,
        engine_dir: Path,
        *,
        max_rows: int = 512,
        kv_dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
    ) -> ReferenceEngine:
        """Opens the checkpoint inside an engine directory. Raises QuasarError when it is not whole, or has several ranks, and for
        a CUDA device without Triton."""
        manifest = Manifest.open(engine_dir)
        check_ranks(engine_dir, manifest.tp_size)
        checkpoint = Checkpoint.open(Path(engine_dir) / "checkpoint")
        tensors = {name: tensor.to(device) for name, tensor in load_tensors(checkpoint.paths[0]).items()}
        model = ReferenceModel(checkpoint.config, checkpoint.recipe, tensors)
        basis = SourceBasis.open(engine_dir, checkpoint.recipe)
        return cls(model, max_seq_len=manifest.limits.max_seq_len, max_rows=max_rows, kv_dtype=kv_dtype, basis=basis)

    def open(self) -> int:
        handle = next(self._handles)
        self._caches[handle] = self.model.new_cache(self._kv_dtype)
        return handle

    def fork(self, sequence: int) -> int:
        cache = self._cache(sequence)
        handle = next(self._handles)
        self._caches[handle] = cache.first(cache.length)
        return handle

    def close(self, sequence: int) -> None:
        self._cache(sequence)
        del self._caches[sequence]

    def length(self, sequence: int) -> int:
        return self._cache(sequence).length

    def truncate(self, sequence: int, length: int) -> None:
        cache = self._cache(sequence)
        if not 0 <= length <= cache.length:
            raise ValueError(f"cannot truncate sequence {sequence} to {length} tokens; it holds {cache.length}")
        self._caches[sequence] = cache.first(length)

    @property
    def cache_bytes(self) -> int:
        distinct = dict(cache.storage for cache in self._caches.values())
        return sum(distinct.values()) * 2 * self.config.num_hidden_layers

    def growth(self, sequence: int, count: int) -> int:
        cache = self._cache(sequence)
        where, held = cache.storage
        shared = sum(other.storage[0] == where for other in self._caches.values()) > 1
        grown = self.bytes_of(cache.length + count)  # the whole cache is written anew
        return grown if shared else max(grown - held * 2 * self.config.num_hidden_layers, 0)

    def bytes_of(self, num_tokens: int) -> int:
        width = self.config.num_key_value_heads * self.config.head_size
        return num_tokens * width * self._kv_dtype.itemsize * 2 * self.config.num_hidden_layers

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        self._kept_layers = tuple(layers)

    def hidden_states(self, index: int, rows: Sequence[int]) -> np.ndarray:
        return self._kept[index][list(rows)].float().cpu().numpy()

    def embeddings(self, ids: Sequence[int]) -> np.ndarray:
        return self.model.embeddings(list(ids)).float().cpu().numpy()

    def head_logits(self, states: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(states).to(self.model.device, self.model.dtype)
        return self.model.logits(rows).cpu().numpy()

    def step(self, batch: Sequence[SequenceStep], accept: Accept) -> list[Acceptance | None]:
        self.check(batch)
        if not batch:
            return []
        # The pass extends copies, so an exception out of `accept` leaves every sequence as it was.
        caches = [self._cache(entry.sequence) for entry in batch]
        extended = [cache.first(cache.length) for cache in caches]
        rows = [(*entry.tokens, *entry.draft.ids) for entry in batch]
        parents = [entry.draft.parents if entry.draft.is_tree else () for entry in batch]
        kept_states: dict[int, Tensor | None] = dict.fromkeys(self._kept_layers)
        states = self.model.hidden_states(list(zip(rows, extended, strict=True)), parents, kept_states)
        states = states.split(list(map(len, rows)))
        if self._kept_layers:
            places = torch.stack([kept_states[layer] for layer in self._kept_layers], dim=1)
            self._kept = places.split(list(map(len, rows)))
        acceptances: list[Acceptance | None] = []
        kept: list[KVCache] = []
        for index, entry in enumerate(batch):
            acceptance, drafted = None, len(entry.draft)
            if entry.needs_logits:
                logits = self.model.logits(states[index][-1 - drafted :])
                acceptance = checked_acceptance(accept(index, logits.cpu().numpy()), entry.draft)
                drafted = acceptance.num_accepted_tokens
            acceptances.append(acceptance)
            committed = caches[index].length + len(entry.tokens)
            if parents[index]:
                kept.append(extended[index].compact(committed, acceptance.path or ()))
            else:
                kept.append(extended[index].first(committed + drafted))
        self._caches.update((entry.sequence, cache) for entry, cache in zip(batch, kept, strict=True))
        return acceptances

    def _cache(self, sequence: int) -> KVCache:
        try:
            return self._caches[sequence]
        except KeyError:
            raise ValueError(f"sequence {sequence} is not open") from None
