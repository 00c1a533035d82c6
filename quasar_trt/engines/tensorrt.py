"""The engine of TensorRT plans: a fixed number of slots in the KV cache, whose ends it keeps.

A sequence has a slot of its own from its opening, a fork one with a copy of the rows. Rolling back is lowering a length: what
a slot holds behind its end is junk that the next pass overwrites; the accepted rows of a tree move together before. A pass runs over
the neighbouring slots from the first to the last that bring rows; the others between them compute padding. Row invariance holds up to
rounding only. No plan has run on a GPU yet: see docs/tensorrt.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quasar_trt.checkpoint import HEAD, Checkpoint, checkpoint_spec, weight_bytes
from quasar_trt.communicator import Communicator
from quasar_trt.engines.base import Accept, Acceptance, Capabilities, Engine, SequenceStep, checked_acceptance
from quasar_trt.engines.plan_bindings import PlanSizes, state_places
from quasar_trt.engines.plan_head import PlanHead
from quasar_trt.engines.plan_passes import PlanPasses, SlotRows, SlotStep, branching
from quasar_trt.engines.plan_ranks import device_of, nccl_communicator
from quasar_trt.engines.plan_session import PlanSession
from quasar_trt.engines.reference import load_tensors
from quasar_trt.engines.source_basis import SourceBasis
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.model_config import ModelConfig
from quasar_trt.plan import PLAN_TARGETS, plan_name
from quasar_trt.recipe import Recipe
from quasar_trt.tensor_parallel import check_ranks, rank_config
from quasar_trt.tensorrt_stack import load_stack


class TensorRTEngine(Engine):
    """See `Engine`. As many sequences are open at a time as the plan has slots."""

    def __init__(
        self,
        session: PlanSession,
        config: ModelConfig,
        sizes: PlanSizes,
        weight_bytes_per_step: int,
        head: PlanHead | None = None,
        source_basis: SourceBasis | None = None,
    ):
        """head, source_basis: for those who read hidden states; without them there are none."""
        self.config = config
        self.max_seq_len = sizes.limits.max_seq_len
        self.weight_bytes_per_step = weight_bytes_per_step
        self.capabilities = Capabilities(
            max_rows=sizes.largest.wanted,
            accepts_inside=False,
            tree=True,
            hidden_states=source_basis is not None,
            fork=True,
            exact=False,
        )
        self.device = session.device.name
        self.open_bytes = session.memory.slot_bytes
        self.cache_capacity = sizes.limits.max_batch_size * self.open_bytes
        self._session = session
        self._memory = session.memory
        self._sizes = sizes
        self._head = head
        self.source_basis = source_basis
        self._passes = PlanPasses(session, sizes, config.hidden_size)
        self._rows: list[SlotRows] = []  # of each entry of the last step
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
        basis = head = None
        if len(checkpoint.paths) == 1:
            basis = SourceBasis.open(engine_dir, checkpoint.recipe)
            head = PlanHead(load_tensors(checkpoint.paths[0]), checkpoint.recipe, device)
        engine = cls(session, config, sizes, _weight_bytes(config, checkpoint.recipe), head, basis)
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
        self._memory.clear(self._slots[handle])
        return handle

    def fork(self, sequence: int) -> int:
        length, handle = self.length(sequence), self.open()
        self._memory.copy(self._slots[sequence], self._slots[handle], length)
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

    @property
    def device_bytes(self) -> int:
        return self._session.device_bytes + (self._head.nbytes if self._head else 0)

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        """Raises ValueError for places that the plan does not give (see `state_places`)."""
        if tuple(layers) == self._passes.places:
            return
        if self.source_basis is None:
            super().keep_hidden_states(layers)
        given = state_places(self.config)
        for layer in layers:
            if layer not in given:
                known = ", ".join(map(str, given))
                raise ValueError(f"the plan gives no hidden states of place {layer}; it gives {known}")
        self._passes.keep_states(layers)

    def hidden_states(self, index: int, rows: Sequence[int]) -> np.ndarray:
        found = self._rows[index].states
        if rows and not 0 <= min(rows) <= max(rows) < len(found):
            raise ValueError(f"there are hidden states of {len(found)} rows, not of rows {list(rows)}")
        return found[list(rows)]

    def embeddings(self, ids: Sequence[int]) -> np.ndarray:
        return self._head.embeddings(ids)

    def head_logits(self, states: np.ndarray) -> np.ndarray:
        return self._head.logits(states)

    def check(self, batch: Sequence[SequenceStep]) -> None:
        """Besides what `Engine.check` refuses, trees that do not fit into a pass of one sequence."""
        super().check(batch)
        most = self._sizes.largest.rows
        for entry in batch:
            if (count := len(branching(entry.draft))) > most:
                raise ValueError(f"sequence {entry.sequence} brings a tree of {count} tokens; the plan allows {most}")

    def step(self, batch: Sequence[SequenceStep], accept: Accept) -> list[Acceptance | None]:
        self.check(batch)
        steps = []
        for entry in batch:
            slot = self._slots[entry.sequence]
            steps.append(SlotStep.of(entry, slot, int(self._lengths[slot])))
        # All before any is accepted: of several ranks the others hear what the first accepts when its passes are over.
        self._rows = self._passes.run(steps, self._lengths)
        acceptances: list[Acceptance | None] = []
        for index, (entry, found) in enumerate(zip(batch, self._rows, strict=True)):
            accepted = checked_acceptance(accept(index, found.logits), entry.draft) if entry.needs_logits else None
            acceptances.append(accepted)
        self._keep(steps, acceptances)  # nothing has changed before
        return acceptances

    def _keep(self, steps: Sequence[SlotStep], acceptances: Sequence[Acceptance | None]) -> None:
        """Committed and accepted tokens stay; those of a tree's path move together."""
        moves, lengths = [], self._lengths.copy()
        for step, accepted in zip(steps, acceptances, strict=True):
            drafted, kept = (step.wanted - 1, accepted.num_accepted_tokens) if accepted else (0, 0)
            committed = step.past + len(step.ids) - drafted
            path = (accepted.path or ()) if step.parents else ()
            moves += [
                (step.slot, committed + index, committed + place) for place, index in enumerate(path) if index != place
            ]
            lengths[step.slot] = committed + kept
        if moves:
            self._memory.move(moves)
        self._lengths = lengths

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
