"""The engine of TensorRT plans: a fixed number of slots in the KV cache, whose ends it keeps.

A sequence has a slot of its own from its opening, a fork one with a copy of the rows. Rolling back is lowering a length: what
a slot holds behind its end is junk that the next pass overwrites. A pass runs over the neighbouring slots from the first to the
last that bring rows; the others between them compute padding. Row invariance holds up to rounding only. No plan has run on a GPU
yet: see docs/tensorrt.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quasar_trt.checkpoint import HEAD, Checkpoint, checkpoint_spec, weight_bytes
from quasar_trt.communicator import Communicator
from quasar_trt.engines.base import Accept, Acceptance, Capabilities, Engine, SequenceStep, checked_acceptance
from quasar_trt.engines.plan_bindings import PlanSizes
from quasar_trt.engines.plan_ranks import device_of, nccl_communicator
from quasar_trt.engines.plan_session import PlanSession
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.model_config import ModelConfig
from quasar_trt.plan import PLAN_TARGETS, plan_name
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import check_ranks, rank_config
from quasar_trt.tensorrt_stack import load_stack


class TensorRTEngine(Engine):
    """See `Engine`. As many sequences are open at a time as the plan has slots."""

    def __init__(self, session: PlanSession, config: ModelConfig, sizes: PlanSizes, weight_bytes_per_step: int):
        self.config = config
        self.max_seq_len = sizes.limits.max_seq_len
        self.weight_bytes_per_step = weight_bytes_per_step
        self.capabilities = Capabilities(
            max_rows=sizes.largest.wanted,
            accepts_inside=False,
            tree=False,
            hidden_states=False,
            fork=True,
            exact=False,
        )
        self.device, self.device_bytes = session.device.name, session.device_bytes
        self.open_bytes = session.slot_bytes
        self.cache_capacity = sizes.limits.max_batch_size * session.slot_bytes
        self._session = session
        self._sizes = sizes
        self._lengths = np.zeros(sizes.limits.max_batch_size, np.int32)  # of slots; 0 for free ones
        self._slots: dict[int, int] = {}  # handle -> slot
        self._handles = itertools.count()

    @classmethod
    def from_dir(cls, engine_dir: Path, ranks: Communicator | None = None) -> TensorRTEngine:
        """ranks: those of a tensor parallel engine, each of which opens its own part; `join` is to follow.

        Raises QuasarError, in this order, for a directory without plans or of another number of ranks, a stack that is missing or
        of another version, a machine without a GPU, a GPU that there is no plan for, and one with too little memory.
        """
        engine_dir = Path(engine_dir)
        manifest = Manifest.open(engine_dir)
        plan = manifest.plan
        if manifest.target not in PLAN_TARGETS:
            raise QuasarError(
                f"{engine_dir} was built for target '{manifest.target}'; engine 'tensorrt' runs targets {', '.join(PLAN_TARGETS)}"
            )
        check_ranks(engine_dir, manifest.tp_size, ranks.size if ranks else 1)
        trt = load_stack(plan.stack)
        if trt.__version__ != plan.version:
            raise QuasarError(
                f"{engine_dir} was compiled by {plan.stack} {plan.version}, {trt.__version__} is installed and cannot run it: "
                f"pip install '{plan.stack}=={plan.version}', or build the engine again"
            )
        device = device_of(ranks)
        if device.sm not in plan.sms:
            raise QuasarError(
                f"{engine_dir} has plans for SM {', '.join(map(str, plan.sms))}; this GPU, {device.name}, is SM {device.sm}: "
                f"build the engine again with --sm {device.sm}"
            )
        checkpoint = Checkpoint.open(engine_dir / "checkpoint")
        config = rank_config(checkpoint.config, manifest.tp_size)
        sizes = PlanSizes(manifest.limits, plan.prefill_rows)
        name = plan_name(device.sm, ranks.rank if ranks else 0)
        session = PlanSession(trt, engine_dir / name, device, config, sizes, name=manifest.files[name].sha256)
        engine = cls(session, config, sizes, _weight_bytes(config, checkpoint.recipe))
        if ranks is None:
            session.start()
        return engine

    def join(self, ranks: Communicator) -> None:
        ranks.watch(lambda: self._session.progress)
        self._session.start(lambda: nccl_communicator(ranks, self._session.device))

    def open(self) -> int:
        free = set(range(len(self._lengths))) - set(self._slots.values())
        if not free:
            raise QuasarError(
                f"all {len(self._lengths)} sequences that this engine holds are open; build it with a larger max_batch_size"
            )
        handle = next(self._handles)
        self._slots[handle] = min(free)  # few slots between those in use
        self._session.clear(self._slots[handle])
        return handle

    def fork(self, sequence: int) -> int:
        length, handle = self.length(sequence), self.open()
        self._session.copy(self._slots[sequence], self._slots[handle], length)
        self._lengths[self._slots[handle]] = length
        return handle

    def close(self, sequence: int) -> None:
        self._lengths[self._slot(sequence)] = 0
        del self._slots[sequence]

    def length(self, sequence: int) -> int:
        return int(self._lengths[self._slot(sequence)])

    def truncate(self, sequence: int, length: int) -> None:
        slot = self._slot(sequence)
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"cannot truncate sequence {sequence} to {length} tokens; it holds {self._lengths[slot]}")
        self._lengths[slot] = length

    @property
    def cache_bytes(self) -> int:
        return self.open_bytes * len(self._slots)

    def growth(self, sequence: int, count: int) -> int:
        return 0

    def bytes_of(self, num_tokens: int) -> int:
        return self.open_bytes

    def step(self, batch: Sequence[SequenceStep], accept: Accept) -> list[Acceptance | None]:
        self.check(batch)
        rows = [[*entry.tokens, *entry.draft.ids] for entry in batch]
        wanted = [1 + len(entry.draft) if entry.needs_logits else 0 for entry in batch]
        together = [index for index, ids in enumerate(rows) if len(ids) <= self._sizes.verify.rows]
        # In this order: a slot between those that run together gets padding where its own rows belong. All before any is accepted:
        # of several ranks the others hear what the first accepts when its passes are over.
        logits = self._run_together(together, batch, rows, wanted)
        for index, entry in enumerate(batch):
            if index not in logits:
                logits[index] = self._run_alone(entry, rows[index], wanted[index])
        acceptances: list[Acceptance | None] = []
        for index, entry in enumerate(batch):
            accepted = checked_acceptance(accept(index, logits[index]), entry.draft) if wanted[index] else None
            acceptances.append(accepted)
        for entry, accepted in zip(batch, acceptances, strict=True):  # nothing has changed before
            kept = accepted.num_accepted_tokens if accepted else 0
            self._lengths[self._slots[entry.sequence]] += len(entry.tokens) + kept
        return acceptances

    def _run_together(
        self, indices: Sequence[int], batch: Sequence[SequenceStep], rows: Sequence[list[int]], wanted: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """One pass over those entries of the batch; index -> its wanted logits, float32."""
        if not indices:
            return {}
        slots = [self._slots[batch[index].sequence] for index in indices]
        first, width = min(slots), max(len(rows[index]) for index in indices)
        ids = np.zeros((max(slots) + 1 - first, width), np.int32)
        wanted_rows: list[int] = []
        for index, slot in zip(indices, slots, strict=True):
            count = len(rows[index])
            ids[slot - first, :count] = rows[index]
            end = (slot - first) * width + count
            wanted_rows += range(end - wanted[index], end)
        logits = self._session.run(first, ids, self._lengths[first : first + len(ids)], wanted_rows)
        if len(indices) < len(batch):  # further passes are to come
            logits = logits.copy()
        ends = np.cumsum([wanted[index] for index in indices])
        return {index: logits[end - wanted[index] : end] for index, end in zip(indices, ends, strict=True)}

    def _run_alone(self, entry: SequenceStep, ids: list[int], wanted: int) -> np.ndarray:
        """A sequence with many rows, in passes without padding; its last `wanted` logits, float32."""
        slot, largest, parts = self._slots[entry.sequence], self._sizes.largest.rows, []
        for start in range(0, len(ids), largest):
            part = np.array([ids[start : start + largest]], np.int32)
            skipped = max(0, len(ids) - wanted - start)
            past = self._lengths[slot : slot + 1] + np.int32(start)
            parts.append(self._session.run(slot, part, past, range(skipped, part.size)).copy())
        return np.concatenate(parts)

    def _slot(self, sequence: int) -> int:
        try:
            return self._slots[sequence]
        except KeyError:
            raise ValueError(f"sequence {sequence} is not open") from None


def _weight_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Bytes of weights that a pass reads of one rank's."""
    read = weight_bytes(config, recipe)
    if recipe.lm_head == "rescored":  # INT8 codes, and BF16 rows of a few ids
        read -= checkpoint_spec(config, recipe)[HEAD].nbytes // 2
    return read
