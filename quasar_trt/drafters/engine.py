"""The engine drafter: another engine, which may have a drafter of its own, writes what comes next.

With an INT8 engine of the same model behind a BF16 verifier the output is that of BF16, at nearly the speed of INT8.

At temperature 0 the drafting engine writes its most probable tokens. Above, it draws each token from its own target
distribution q under the request's parameters, with noise of its own, and the verifier tests it against q. (With the verifier's
noise the ids would not depend on the drafting engine, but fewer tokens would be accepted: docs/drafters.md.) Its own drafter
changes nothing about what it writes: what it says is accepted where the draw gives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from quasar_trt.draft_length import DraftLengths
from quasar_trt.drafters.agreement import Agreement
from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest, check_num_speculative_tokens
from quasar_trt.drafters.block_lengths import BlockLengths
from quasar_trt.drafters.draft_sequences import DraftSequences
from quasar_trt.drafters.engine_block import Block
from quasar_trt.drafters.ngram import NgramDrafter, NgramOptions
from quasar_trt.drafters.suffix import SuffixDrafter, SuffixOptions
from quasar_trt.drafters.through_text import TextBlock, ThroughText
from quasar_trt.drafters.vocabulary import SameVocabulary, check_same_vocabulary
from quasar_trt.engines import open_engine
from quasar_trt.engines.base import Engine, SequenceStep
from quasar_trt.errors import QuasarError, named_options, unknown
from quasar_trt.kv_budget import KvBudget
from quasar_trt.machine import available_memory
from quasar_trt.manifest import Manifest
from quasar_trt.prompt_chunks import PromptChunks
from quasar_trt.step_cost import StepCost, compare, measure, one_row, open_step_cost

# Those that can draft behind what is only supposed to follow the context.
_DRAFTERS = {"suffix": (SuffixDrafter, SuffixOptions), "ngram": (NgramDrafter, NgramOptions)}
_KV_SHARE = 0.25  # of the memory that is available; the verifier takes half
_MAX_KEPT = 16  # sequences of ended requests
_READING = 1.0  # seconds that a step may spend on a text that nobody but its own request waits for
_FEW = 32  # ids; more that the drafting engine has not read are taken for a prompt
_MAX_BLOCK = 16  # tokens, for the costs of an engine that was opened by the caller


@named_options("engine drafter option")
@dataclass(frozen=True)
class EngineOptions:
    """num_speculative_tokens: the most draft tokens per request and step; None for as many as the verifier allows.

    drafter: who drafts for the drafting engine and behind its blocks: "suffix", "ngram" or "none".
    draft_tokenizer: where the drafting engine has another vocabulary, let it draft through text.
    kv_cache_memory_bytes: the most memory for the drafting engine's keys and values; None for a quarter of what is available.
    """

    num_speculative_tokens: int | None = None
    drafter: str = "suffix"
    draft_tokenizer: bool = False
    kv_cache_memory_bytes: int | None = None

    def __post_init__(self):
        check_num_speculative_tokens(self.num_speculative_tokens)
        if self.drafter not in ("none", *_DRAFTERS):
            raise unknown("drafter of an engine drafter", str(self.drafter), ("none", *_DRAFTERS))
        if not isinstance(self.draft_tokenizer, bool):
            raise QuasarError(f"draft_tokenizer is {self.draft_tokenizer!r}; allowed: true or false")
        value = self.kv_cache_memory_bytes
        if value is not None and (type(value) is not int or value < 1):
            raise QuasarError(f"kv_cache_memory_bytes is {value!r}; allowed: a number of bytes, at least 1")


class EngineDrafter(Drafter):
    """Blocks of tokens that another engine writes, each followed by what its own drafter would say next.

    engine: an engine directory, or an engine that is open. `options` are those of EngineOptions.

    Raises QuasarError for a directory that is no engine or is damaged, and for unknown or wrong options.
    """

    draws = True

    def __init__(self, engine: Engine | str | Path, **options):
        self.options = EngineOptions(**options)
        self.num_speculative_tokens = self.options.num_speculative_tokens
        self._given = engine if isinstance(engine, Engine) else Path(engine)
        self._manifest = None if isinstance(engine, Engine) else Manifest.open(self._given)
        self._drafter: Drafter | None = None
        if self.options.drafter != "none":
            drafter, options_class = _DRAFTERS[self.options.drafter]
            self._drafter = drafter(options_class())
        self._agreement = Agreement()
        self._written: dict[int, Block] = {}  # the last block of each request

    def attach(self, engine: Engine, step_cost: StepCost | None, tokenizer: object | None) -> None:
        drafting, directory, cost = self._given, None, None
        if self._manifest is not None:
            directory = self._given
            drafting = open_engine(directory, beside=engine)
        if drafting.capabilities.accepts_inside:
            raise QuasarError(
                f"drafting engine {directory or type(drafting).__name__} samples by itself, so its tokens have no known "
                "probabilities; draft with an engine of another target"
            )
        sizes = engine.config.vocab_size, drafting.config.vocab_size
        self._vocabulary, self._block = SameVocabulary(*sizes), Block
        try:
            check_same_vocabulary(tokenizer, directory, sizes)
        except QuasarError:
            if not self.options.draft_tokenizer:
                raise
            self._vocabulary, self._block = ThroughText(tokenizer, directory), TextBlock
        if step_cost is not None:
            cost = open_step_cost(drafting, self._manifest) if directory else StepCost(measure(drafting, _MAX_BLOCK)[0])
        num_bytes = self.options.kv_cache_memory_bytes
        if num_bytes is None and drafting.cache_capacity is None:
            num_bytes = int(_KV_SHARE * available_memory())
        self._engine = drafting
        self._sequences = DraftSequences(drafting, KvBudget(drafting, num_bytes), _MAX_KEPT)
        self._chunks = PromptChunks(cost, drafting.capabilities.max_rows)
        self._tested = DraftLengths(cost)
        self._cost = cost
        self._lengths = None
        if cost:
            with one_row(drafting) as ours, one_row(engine) as theirs:
                self._lengths = BlockLengths(step_cost, cost, compare(ours, theirs))

    def start(self, request_id: int, context: Sequence[int]) -> None:
        if self._drafter:
            self._drafter.start(request_id, context)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        blocks = [self._begin(request) for request in batch]
        self._look_ahead(blocks)
        if self._lengths:
            self._lengths.begin()
        while going := [block for block in blocks if block.goes_on]:
            free = max(self._engine.capabilities.max_rows - len(going), 0)
            lengths = self._tested.choose([block.testable for block in going], len(going), len(going), free)
            for block, length in zip(going, lengths, strict=True):
                block.num_tested = length
            if self._lengths and not self._lengths.pays(blocks, self._agreement):
                break
            self._write(going)
            self._look_ahead([block for block in going if block.goes_on])
        self._written.update((block.request.request_id, block) for block in blocks)
        self.seconds = self._lengths.seconds if self._lengths else 0.0
        return [block.whole_draft(self._agreement) for block in blocks]

    def observe(self, request_id: int, emitted: Sequence[int], num_accepted_tokens: int) -> None:
        block = self._written.pop(request_id, None)
        for kind, written, token in zip(block.kinds, block.ids, emitted, strict=False) if block else ():
            self._agreement.count(kind, written == token)
            if written != token:
                break
        if self._drafter:
            self._drafter.observe(request_id, emitted, num_accepted_tokens)

    def pause(self, request_id: int) -> None:
        self._sequences.close(request_id, keep=False)
        if self._drafter:
            self._drafter.pause(request_id)

    def stop(self, request_id: int) -> None:
        self._written.pop(request_id, None)
        self._sequences.close(request_id, keep=True)
        if self._drafter:
            self._drafter.stop(request_id)

    def forget_prefixes(self) -> None:
        self._sequences.forget()
        if self._drafter:
            self._drafter.forget_prefixes()

    def _begin(self, request: DraftRequest) -> Block:
        text = self._vocabulary.ids(request.context)
        fits = len(text) <= self._engine.max_seq_len
        sequence = self._sequences.settle(request.request_id, text) if fits else None
        return self._block(request, sequence, text, self._vocabulary, goes_on=sequence is not None)

    def _look_ahead(self, blocks: Sequence[Block]) -> None:
        """Asks the drafting engine's own drafter how these blocks would go on."""
        if self._drafter and blocks:
            asked = [
                dataclasses.replace(block.request, limit=block.room, tree=False, ahead=block.ids) for block in blocks
            ]
            for block, tail in zip(blocks, self._drafter.propose(asked), strict=True):
                block.tail = tail

    def _write(self, going: Sequence[Block]) -> None:
        """The drafting engine writes more of some of these blocks.

        Where it has to read a long text before it can write, it reads one chunk while it writes for others; where nobody
        else waits, it reads on for a while. Blocks that it could not write have to wait for the next step.
        """
        until = perf_counter() + _READING
        while not self._pass(going) and perf_counter() < until:
            pass
        for block in going:
            block.goes_on = block.goes_on and block.num_pending <= _FEW

    def _pass(self, going: Sequence[Block]) -> bool:
        """One pass: each block brings what it has pending and as much of its tail as is tested. False when there was only
        reading."""
        going = [block for block in going if block.goes_on]
        num_ready = sum(block.num_pending <= _FEW for block in going)
        most = self._chunks.most_rows(num_ready)
        left = self._engine.capabilities.max_rows
        blocks, steps, rows = [], [], []
        for block in going:
            ready = block.num_pending <= _FEW
            chunk = block.text[len(block.sequence.cached) :][: left if ready else min(left, most)]
            whole = len(chunk) == block.num_pending
            count = min(block.num_tested, left - len(chunk), block.room - 1, self._engine.max_seq_len - len(block.text))
            draft = block.testable.first(max(count, 0)) if whole else NO_DRAFT
            step = block.sequence.handle, len(chunk) + len(draft)
            if not chunk or not self._sequences.has_room([*rows, step]):
                block.goes_on = False
                continue
            rows.append(step)
            left -= step[1]
            most -= 0 if ready else step[1]
            blocks.append(block)
            steps.append(SequenceStep(block.sequence.handle, chunk, draft, needs_logits=whole))
        if not steps:
            return True
        began = perf_counter()
        acceptances = self._engine.step(steps, lambda index, logits: blocks[index].accept(logits, steps[index].draft))
        self._observe_cost(steps, perf_counter() - began)
        for block, step, acceptance in zip(blocks, steps, acceptances, strict=True):
            block.extend(step.tokens, step.draft, acceptance, self._engine.max_seq_len)
        return any(step.needs_logits for step in steps)

    def _observe_cost(self, steps: Sequence[SequenceStep], seconds: float) -> None:
        num_prompt_rows = sum(len(step.tokens) for step in steps if len(step.tokens) > _FEW)
        num_rows = sum(len(step.tokens) + len(step.draft) for step in steps)
        self._chunks.observe(num_rows, num_prompt_rows, seconds)
        if self._cost and not num_prompt_rows:
            self._cost.observe(num_rows, seconds)
