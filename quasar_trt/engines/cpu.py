"""The native CPU engine: runs a decoder pass from the packed, memory-mapped `rank{r}.engine` in one native call.

Values are rounded to BF16 in two places only: the weights (as built) and the keys and values in the cache. Logits are
float32. Row invariance holds bit for bit: a row's logits do not depend on the rows, sequences, threads or prefill chunks
that share its pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.checkpoint import EMBEDDING, check_hadamard_blocks, check_tensors
from quasar_trt.communicator import Communicator
from quasar_trt.engines.base import Accept, Acceptance, Capabilities, Engine, SequenceStep, checked_acceptance
from quasar_trt.engines.cpu_layout import LAYOUT_VERSION, packed_spec
from quasar_trt.engines.source_basis import SourceBasis
from quasar_trt.errors import QuasarError, unknown
from quasar_trt.machine import usable_cpus
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins import native
from quasar_trt.recipe import RESCORED, Recipe
from quasar_trt.rope import rope_tables
from quasar_trt.tensor_parallel import check_ranks
from quasar_trt.tensorfile import float32_of, map_tensors, read_header

MAX_ROWS = 256


class CpuEngine(Engine):
    """See `Engine`. Tokens and logits only; one instance serves one thread of callers at a time.

    pool: native threads, which others may use between passes.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_seq_len: int,
        threads: int | None = None,
        beside: CpuEngine | None = None,
        isa: str = "",
        max_rows: int = MAX_ROWS,
        ranks: Communicator | None = None,
    ):
        """Maps `path`, a `rank{r}.engine`.

        threads: native threads, default all cores of the process, shared with ranks that may run on them too. beside: an engine
        whose threads it shares instead of starting its own; the two are never used at once. isa: one of `native.isa_names()`,
        "" for the best here. ranks: those of a tensor parallel engine, each of which opens its own file. They take every step
        together; rank 0 alone has logits.
        Raises QuasarError for a file of another layout or another rank, or a machine without the native extension.
        """
        if native.UNAVAILABLE:
            raise QuasarError(f"engine 'cpu' cannot run: {native.UNAVAILABLE}")
        if isa and isa not in native.isa_names():
            raise unknown("instruction set", isa, native.isa_names())
        if beside:
            threads = beside.threads
        elif threads is None:
            threads = max(1, usable_cpus() // (ranks.num_sharing if ranks else 1))
        if threads < 1:
            raise QuasarError(f"threads is {threads}; allowed: 1 or more")
        rank = ranks.rank if ranks else 0
        self.config, self.recipe = _read_description(path, rank, ranks.size if ranks else 1)
        self.max_seq_len = max_seq_len
        self.threads = threads
        self.isa = isa or native.isa_names()[0]
        self.source_basis = None if ranks else SourceBasis.open(path.parent, self.recipe)
        self._kept_layers: tuple[int, ...] = ()
        self._first_rows: list[int] = []  # of the entries of the last pass
        self.capabilities = Capabilities(
            max_rows=max_rows,
            accepts_inside=False,
            tree=True,
            hidden_states=self.source_basis is not None,
            fork=True,
            exact=True,
        )
        self._tensors = tensors = map_tensors(path)
        self.weight_bytes_per_step = sum(
            tensor.nbytes for name, tensor in tensors.items() if name.endswith(".weight") and tensor.ndim == 4
        )
        tensors["rope.cos"], tensors["rope.sin"] = map(np.ascontiguousarray, rope_tables(self.config, max_seq_len))
        shape = {
            "layers": self.config.num_hidden_layers,
            "hidden": self.config.hidden_size,
            "intermediate": self.config.intermediate_size,
            "heads": self.config.num_attention_heads,
            "kv_heads": self.config.num_key_value_heads,
            "head": self.config.head_size,
            "vocab": self.config.vocab_size,
            "norm_epsilon": self.config.norm_epsilon,
            "activations": self.recipe.activations or 0,
            "hadamard_blocks": hadamard_blocks(self.config, self.recipe),
            "rescored": RESCORED,
            "max_rows": max_rows,
            "max_seq_len": max_seq_len,
            "rank": rank,
            "ranks": self.config.tp_size,
            "vocab_share": self.config.logits_size,
            "attention_inputs": 0,
        }
        try:
            self.pool = beside.pool if beside else native.thread_pool(threads)
            self._decoder = native.decoder(shape, tensors, self.pool, self.isa, ranks and ranks.collectives)
        except RuntimeError as error:  # the system's limit of threads or memory
            raise QuasarError(f"cannot start {threads} threads ({error}); ask for fewer with threads") from None
        if ranks:
            ranks.watch(lambda: self._decoder.progress)

    def open(self) -> int:
        return self._decoder.open()

    def fork(self, sequence: int) -> int:
        return self._decoder.fork(sequence)

    def close(self, sequence: int) -> None:
        self._decoder.close(sequence)

    def length(self, sequence: int) -> int:
        return self._decoder.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        self._decoder.truncate(sequence, length)

    @property
    def cache_bytes(self) -> int:
        return self._decoder.cache_bytes

    @property
    def communication_seconds(self) -> float:
        return self._decoder.collective_seconds

    def growth(self, sequence: int, count: int) -> int:
        return self._decoder.growth(sequence, count)

    def bytes_of(self, num_tokens: int) -> int:
        return self._decoder.bytes_of(num_tokens)

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        if tuple(layers) != self._kept_layers:
            self._decoder.keep_states(list(layers))
            self._kept_layers = tuple(layers)

    def hidden_states(self, index: int, rows: Sequence[int]) -> np.ndarray:
        first = self._first_rows[index]
        return self._decoder.states([first + row for row in rows], len(self._kept_layers))

    def embeddings(self, ids: Sequence[int]) -> np.ndarray:
        return float32_of(self._tensors[EMBEDDING][list(ids)])

    def head_logits(self, states: np.ndarray) -> np.ndarray:
        weight, scale = self._tensors["lm_head.weight"], self._tensors.get("lm_head.scale")
        return native.head_linear(states, weight, scale, self.config.vocab_size, self.pool, self.isa)

    def step(self, batch: Sequence[SequenceStep], accept: Accept) -> list[Acceptance | None]:
        self.check(batch)
        lengths, parts, tokens = [], [], []
        self._first_rows = []
        for entry in batch:
            self._first_rows.append(len(tokens))
            lengths.append(self.length(entry.sequence))
            drafted = len(entry.draft.ids)
            parents = entry.draft.parents if entry.draft.is_tree else ()
            parts.append(
                (entry.sequence, len(entry.tokens) + drafted, 1 + drafted if entry.needs_logits else 0, parents)
            )
            tokens += entry.tokens
            tokens += entry.draft.ids
        logits = self._decoder.step(parts, np.array(tokens, np.int32))
        acceptances: list[Acceptance | None] = []
        row = 0
        try:
            for index, (entry, (_, _, wanted, _)) in enumerate(zip(batch, parts, strict=True)):
                rows = logits[row : row + wanted]
                row += wanted
                acceptances.append(checked_acceptance(accept(index, rows), entry.draft) if wanted else None)
        except BaseException:
            for entry, length in zip(batch, lengths, strict=True):
                self.truncate(entry.sequence, length)
            raise
        for entry, length, acceptance in zip(batch, lengths, acceptances, strict=True):
            if acceptance is not None and acceptance.num_accepted_tokens < len(entry.draft.ids):
                committed = length + len(entry.tokens)
                if entry.draft.is_tree:
                    self._decoder.compact(entry.sequence, committed, acceptance.path or ())
                else:
                    self.truncate(entry.sequence, committed + acceptance.num_accepted_tokens)
        return acceptances


def _read_description(path: Path, rank: int, num_ranks: int) -> tuple[ModelConfig, Recipe]:
    """Model and recipe from the file's metadata, once it is known to be this rank's, with the layout and the tensor table that
    this version reads."""
    specs, _, metadata, _ = read_header(path)
    if metadata.get("layout_version") != LAYOUT_VERSION:
        raise QuasarError(
            f"{path} has packed layout {metadata.get('layout_version')}, this version reads {LAYOUT_VERSION}; build the engine again"
        )
    try:
        config = ModelConfig.from_dict(json.loads(metadata["model"]))
        recipe = Recipe.from_dict(json.loads(metadata["recipe"]))
        blocks = json.loads(metadata["hadamard_blocks"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise QuasarError(f"{path} does not describe its model ({error!r}); build the engine again") from None
    check_ranks(path, config.tp_size, num_ranks)
    if metadata.get("rank") != str(rank):
        raise QuasarError(f"{path} is of rank {metadata.get('rank')}, this is rank {rank}; build the engine again")
    check_hadamard_blocks(blocks, config, recipe, str(path))
    check_tensors(specs, packed_spec(config, recipe), str(path))
    return config, recipe
