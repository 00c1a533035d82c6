"""An engine beside the reference engine: the ids they emit, and the logits and hidden states of the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quasar_trt.drafters.base import Draft
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep
from quasar_trt.engines.plan_bindings import state_places
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

# Logits. Roundings to BF16 move a logit near 20 by up to 0.06, and those before it by several times as much.
WIDEST_GAP = 0.5
LARGEST_KL = 0.01
FARTHEST_STATES = 0.2  # relative; those of another basis or row are as far away as they are large, or farther


@dataclass(frozen=True)
class EngineComparison:
    """num_equal: of num_prompts, those whose ids are the reference engine's, drafted and in one batch.

    gap: where ids part, the most by which the reference engine prefers its own id, in logits. Of an engine that gives its
    logits, over all rows of the reference engine's answers: kl, the mean of KL(reference || engine); agreement, the share of
    rows with the same most probable id; difference, the largest of two logits. states: the distance of the hidden states over the first
    prompt and its answer, relative to their size, at the place where it is largest. None where an engine gives none.
    """

    num_prompts: int
    num_equal: int
    gap: float
    kl: float | None = None
    agreement: float | None = None
    difference: float | None = None
    states: float | None = None

    @property
    def failure(self) -> str:
        """What is further apart than roundings explain; "" where nothing is."""
        failures = []
        if not self.gap <= WIDEST_GAP:
            failures.append(
                f"ids part where the reference engine's logits are {self.gap:.3f} apart, more than {WIDEST_GAP}"
            )
        if self.kl is not None and not self.kl <= LARGEST_KL:
            failures.append(f"KL to the reference engine is {self.kl:.4f}, more than {LARGEST_KL}")
        if self.states is not None and not self.states <= FARTHEST_STATES:
            failures.append(f"hidden states are {self.states:.3f} of their size off, more than {FARTHEST_STATES}")
        return "; ".join(failures)

    def to_dict(self) -> dict:
        allowed = {"widest_gap": WIDEST_GAP, "largest_kl": LARGEST_KL, "farthest_states": FARTHEST_STATES}
        return dataclasses.asdict(self) | {f"{name}_allowed": value for name, value in allowed.items()}


def compare(
    engine: Engine, reference: Engine, prompts: Sequence[list[int]], max_tokens: int, max_draft_len: int
) -> EngineComparison:
    """Answers the prompts with both, greedily; the engine with drafts of up to max_draft_len, trees where it verifies such."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    drafter = make_drafter("suffix", {"num_speculative_tokens": max_draft_len, "branches": 2})
    found = _answers(Runner(engine, drafter=drafter, max_draft_len=max_draft_len), prompts, params)
    expected = _answers(Runner(reference), prompts, params)
    gap, kls, same, difference = 0.0, [], [], 0.0
    for prompt, answer, own in zip(prompts, expected, found, strict=True):
        rows = logits_of(reference, prompt, answer, max_draft_len)
        parting = next((i for i, pair in enumerate(zip(answer, own, strict=True)) if pair[0] != pair[1]), None)
        if parting is not None:
            gap = max(gap, float(rows[parting, answer[parting]] - rows[parting, own[parting]]))
        if not engine.capabilities.accepts_inside:
            own_rows = logits_of(engine, prompt, answer, max_draft_len)
            p, q = _log_softmax(rows), _log_softmax(own_rows)
            kls += (np.exp(p) * (p - q)).sum(axis=1).tolist()
            same += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
            difference = max(difference, float(np.abs(rows - own_rows).max()))
    num_equal = sum(answer == own for answer, own in zip(expected, found, strict=True))
    if not kls:
        return EngineComparison(len(prompts), num_equal, gap)
    states = None
    if engine.capabilities.hidden_states and reference.capabilities.hidden_states:
        text, places = [*prompts[0], *expected[0][:-1]], state_places(engine.config)
        rows, own_rows = (states_of(each, text, places) for each in (reference, engine))
        states = float((_norms(own_rows - rows) / _norms(rows)).max())
    return EngineComparison(len(prompts), num_equal, gap, float(np.mean(kls)), float(np.mean(same)), difference, states)


def logits_of(engine: Engine, prompt: list[int], answer: list[int], max_draft_len: int) -> np.ndarray:
    """float32 [answer, vocab]: the rows that the ids of the answer follow, by verify passes that accept all."""
    ids, sequence, parts = [*prompt, *answer[:-1]], engine.open(), []

    def accept(index: int, logits: np.ndarray) -> Acceptance:
        parts.append(logits.copy())
        return Acceptance((), len(logits) - 1)

    try:
        for start in range(0, len(prompt) - 1, engine.capabilities.max_rows):
            chunk = ids[start : min(start + engine.capabilities.max_rows, len(prompt) - 1)]
            engine.step([SequenceStep(sequence, chunk, needs_logits=False)], accept)
        for start in range(len(prompt) - 1, len(ids), 1 + max_draft_len):
            token, *drafted = ids[start : start + 1 + max_draft_len]
            engine.step([SequenceStep(sequence, [token], Draft(tuple(drafted)))], accept)
    finally:
        engine.close(sequence)
    return np.concatenate(parts)[:, : engine.config.vocab_size]


def states_of(engine: Engine, ids: list[int], places: Sequence[int]) -> np.ndarray:
    """float32 [ids, places, hidden_size]: the hidden states of a text."""
    sequence, parts, most = engine.open(), [], engine.capabilities.max_rows
    engine.keep_hidden_states(places)
    try:
        for start in range(0, len(ids), most):
            chunk = ids[start : start + most]
            engine.step([SequenceStep(sequence, chunk, needs_logits=False)], lambda index, logits: None)
            parts.append(engine.hidden_states(0, range(len(chunk))))
    finally:
        engine.keep_hidden_states(())
        engine.close(sequence)
    return np.concatenate(parts)


def _norms(states: np.ndarray) -> np.ndarray:
    """Of each place, over all tokens."""
    return np.sqrt(np.square(states.astype(np.float64)).sum(axis=(0, 2)))


def _answers(runner: Runner, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    answers = [list(output.outputs[0].token_ids) for output in runner.generate(prompts, params)]
    runner.reset_prefix_cache()
    return answers


def _log_softmax(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
