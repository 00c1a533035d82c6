"""Generation: prompts in, completions out, as text or as token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.drafters.base import Drafter
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.generation import Generation
from quasar_trt.generation_config import GenerationConfig
from quasar_trt.kv_budget import KvBudget
from quasar_trt.manifest import Manifest
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.outputs import RequestOutput, StreamOutput
from quasar_trt.prompts import Prompt, as_list, token_ids
from quasar_trt.request import Request
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.scheduler import Scheduler
from quasar_trt.service_metrics import Load, ServiceMetrics
from quasar_trt.step_cost import StepCost, open_step_cost


class Runner:
    """Drives one engine and at most one drafter. Not for use from several threads at once.

    tokenizer: a transformers tokenizer, the directory that one is loaded from when text is first read or written, or None
        when only token ids go in and out.
    eos_token_ids: ids that end a request, the model's own first; None for the tokenizer's own, if there is one.
    default_sampling_params: for requests that come without; None for SamplingParams().
    max_batch_size: requests per pass; further ones wait and join as others finish.
    max_draft_len: the most draft tokens per request and pass.
    step_cost: by which draft lengths are chosen, so that drafting pays, and chunks of prompts, so that they do not hold up
        requests that decode; None verifies every draft whole and takes prompts as fast as they go.
    kv_cache_memory_bytes: the most memory for keys and values; None for half of what is available now. Where it runs out, the
        request that arrived last is computed again later.

    max_seq_len: tokens of the longest sequence, by the engine's limit and by kv_cache_memory_bytes.

    Raises QuasarError for limits that leave nothing to do, and for a drafter that may propose more than max_draft_len or does not fit
    the engine.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer=None,
        drafter: Drafter | None = None,
        eos_token_ids: Sequence[int] | None = None,
        default_sampling_params: SamplingParams | None = None,
        max_batch_size: int = 16,
        max_draft_len: int = 16,
        step_cost: StepCost | None = None,
        kv_cache_memory_bytes: int | None = None,
    ):
        self.engine = engine
        if drafter:
            drafter.attach(engine, step_cost, tokenizer)
        self._kv_budget = KvBudget(engine, kv_cache_memory_bytes)
        self._scheduler = Scheduler(engine, drafter, max_batch_size, max_draft_len, self._kv_budget, step_cost)
        self._tokenizer = tokenizer
        if eos_token_ids is None:
            own = None if self.tokenizer is None else self.tokenizer.eos_token_id
            eos_token_ids = () if own is None else (own,)
        self.eos_token_ids = tuple(eos_token_ids)
        self.default_sampling_params = default_sampling_params or SamplingParams()
        self._num_requests = 0
        self._token_texts: dict[int, str] = {}

    @classmethod
    def from_dir(
        cls,
        engine_dir: str | Path,
        drafter: str | Drafter | None = "suffix",
        drafter_options: Mapping[str, object] | None = None,
        engine: str = "auto",
        threads: int | None = None,
        kv_cache_memory_bytes: int | None = None,
    ) -> Runner:
        """A runner for an engine directory, with its limits, tokenizer, end-of-sequence ids and default sampling parameters.

        drafter: a name with `drafter_options`, or a drafter. The tokenizer is loaded when it is first needed. The costs of the
        engine's passes are measured the first time that this engine is opened on this machine, mostly within half a second.
        Of several ranks rank 0 alone returns (docs/ranks.md). Raises QuasarError for a directory that is no
        engine or is damaged, for an unknown drafter, option or engine, and for kv_cache_memory_bytes that hold no sequence.
        """
        from quasar_trt.engines import open_engine
        from quasar_trt.ranks import lead

        lead()  # the other ranks stay here: what follows is said and done once
        engine_dir = Path(engine_dir)
        if not isinstance(drafter, Drafter):
            drafter = make_drafter(drafter, drafter_options)
        elif drafter_options:
            raise QuasarError(
                f"drafter_options are {dict(drafter_options)}, but the drafter is made already; leave them out"
            )
        manifest = Manifest.open(engine_dir)
        limits = manifest.limits
        generation = GenerationConfig.read(engine_dir)
        opened = open_engine(engine_dir, engine=engine, threads=threads)
        return cls(
            opened,
            tokenizer=engine_dir if (engine_dir / "tokenizer.json").is_file() else None,
            drafter=drafter,
            eos_token_ids=generation.eos_token_ids,
            default_sampling_params=SamplingParams(**generation.sampling),
            max_batch_size=limits.max_batch_size,
            max_draft_len=limits.max_draft_len,
            step_cost=open_step_cost(opened, manifest),
            kv_cache_memory_bytes=kv_cache_memory_bytes,
        )

    @property
    def stats(self) -> SpeculationMetrics:
        """Metrics over all requests of this runner so far."""
        return self._scheduler.stats

    @property
    def service(self) -> ServiceMetrics:
        """Latencies, preemptions and reuse over all requests of this runner so far."""
        return self._scheduler.service

    @property
    def load(self) -> Load:
        """Requests that wait and run, and the memory of their keys and values, now."""
        return self._scheduler.load

    @property
    def max_seq_len(self) -> int:
        return self._kv_budget.max_seq_len

    def reset_prefix_cache(self) -> None:
        """Frees the keys and values of finished requests, which are kept for later ones that begin alike."""
        self._scheduler.forget_prefixes()

    @property
    def tokenizer(self):
        """The tokenizer, loaded on first use; None when the runner was made without one."""
        if isinstance(self._tokenizer, str | Path):
            from quasar_trt.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self._tokenizer)
        return self._tokenizer

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Prompt ids of a conversation [{"role": ..., "content": ...}], through the model's chat template."""
        from quasar_trt.tokenizer import encode_chat

        return encode_chat(self._need_tokenizer(), messages)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or several, given as text or as token ids; the answers come in the prompts' order.

        sampling_params: for every prompt, or a list of one per prompt; `default_sampling_params` where None.
        timeout: seconds after which what is not finished ends with finish_reason "timeout" and what there is of it.

        Raises QuasarError for a prompt that is empty, too long, of another type or has ids outside of the vocabulary, and
        for sampling parameters that do not match the prompts or the model, before anything runs.
        """
        prompts = as_list(prompts)
        if not isinstance(sampling_params, list | tuple):
            sampling_params = [sampling_params] * len(prompts)
        elif len(sampling_params) != len(prompts):
            raise QuasarError(
                f"sampling_params has {len(sampling_params)} entries; allowed: one per prompt, {len(prompts)}"
            )
        pairs = zip(prompts, sampling_params, strict=True)
        generations = [self.prepare(*pair, detokenize=False, timeout=timeout) for pair in pairs]
        try:
            for generation in generations:
                self.submit(generation)
            for generation in generations:
                while not generation.finished:
                    self.step()
        finally:
            for generation in generations:
                self.abort(generation)
        return [generation.output() for generation in generations]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation [{"role": ..., "content": ...}] or a list of them; the rest is as in `generate`."""
        several = isinstance(messages, Sequence) and messages and isinstance(messages[0], list | tuple)
        return self.generate([self.chat_ids(each) for each in (messages if several else [messages])], sampling_params)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        detokenize: bool = True,
        timeout: float | None = None,
    ) -> Iterator[StreamOutput]:
        """Completes one prompt, step by step; the prompt is checked at once, the work begins with the first piece.

        detokenize: False leaves the text of the pieces empty, for whoever wants ids only.
        timeout: seconds from the beginning of the work, as in `generate`.

        The texts of a completion's pieces join to its text. Raises QuasarError as `generate` does, and from the iterator
        when the engine gives a row that is no distribution.
        """
        return self._stream(self.prepare(prompt, sampling_params, detokenize=detokenize, timeout=timeout))

    def _stream(self, generation: Generation) -> Iterator[StreamOutput]:
        try:
            self.submit(generation)
            while not generation.is_told:
                if not generation.has_news:
                    self.step()  # otherwise a neighbour has advanced one of its completions
                yield from generation.pieces()
        finally:
            self.abort(generation)

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        detokenize: bool = True,
        timeout: float | None = None,
        drafts: bool = True,
    ) -> Generation:
        """A checked prompt, for whoever calls `submit`, `step` and `abort` himself. Parameters and errors as in `stream`.

        drafts: False decodes it plainly, which changes no token (with drafters that give no probabilities).
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise QuasarError(
                f"sampling_params is {reprlib.repr(params)}; allowed: SamplingParams; generate also takes a list of one per prompt"
            )
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise QuasarError(f"timeout is {timeout!r}; allowed: seconds, 0 or more, or None for no limit")
        text = prompt if isinstance(prompt, str) else None
        ids = self._encode(text) if text is not None else token_ids(prompt)
        if not ids:
            raise QuasarError("the prompt has no tokens; give at least one")
        self._kv_budget.check_prompt(len(ids))
        self._check_ids("the prompt", ids, "; was another tokenizer used?")
        bad_words = self._check_params(params)
        detokenizes = bool(params.stop) or (detokenize and self.tokenizer is not None)
        requests = []
        for index in range(params.n):
            requests.append(
                Request(
                    self._num_requests,
                    text,
                    ids,
                    params,
                    self.eos_token_ids,
                    self.max_seq_len,
                    sample_index=index,
                    detokenizer=self._detokenizer(params) if detokenizes else None,
                    bad_words=bad_words,
                    timeout=timeout,
                    drafts=drafts,
                )
            )
            self._num_requests += 1
        for request in requests:
            request.siblings = requests
        return Generation(requests, detokenize, lambda: self.tokenizer, self._token_texts)

    def submit(self, generation: Generation) -> None:
        """Queues it, behind what was submitted before."""
        for request in generation.requests:
            self._scheduler.submit(request)

    def step(self) -> None:
        """One pass of the engine for all that was submitted and goes on, as far as there is room. Raises what the engine raises."""
        self._scheduler.step()

    def abort(self, generation: Generation) -> None:
        """Ends what is not finished, with finish_reason "abort", and frees what it held. Not from within a pass."""
        self._scheduler.abort(generation.requests)

    def _check_params(self, params: SamplingParams) -> list[list[int]]:
        """The ids of each bad word. Raises QuasarError for parameters that do not fit the model or the engine."""
        self.engine.check_params(params)
        vocab = self.engine.config.vocab_size
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            self._check_ids(name, list(getattr(params, name) or ()))
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab:
                raise QuasarError(
                    f"{name} is {getattr(params, name)}; allowed: at most the vocabulary's {vocab}, or -1 for all of it"
                )
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise QuasarError(
                    f"{name} is {getattr(params, name)}, but this engine has no tokenizer (tokenizer.json); give "
                    "stop_token_ids or logit_bias instead, or build it from a model that has one"
                )
        if not params.bad_words:
            return []
        from quasar_trt.tokenizer import bad_word_ids

        return bad_word_ids(self.tokenizer, params.bad_words)

    def _check_ids(self, name: str, ids: list[int], hint: str = "") -> None:
        vocab = self.engine.config.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            wrong = next(token for token in ids if not 0 <= token < vocab)
            raise QuasarError(f"{name} has token id {wrong}; allowed: 0 to {vocab - 1}{hint}")

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        from quasar_trt.tokenizer import detokenizer_for

        return detokenizer_for(self.tokenizer, params)

    def _need_tokenizer(self):
        if self.tokenizer is None:
            raise QuasarError(
                "this engine has no tokenizer (tokenizer.json); give token ids, or build it from a model that has one"
            )
        return self.tokenizer

    def _encode(self, text: str) -> list[int]:
        from quasar_trt.tokenizer import encode

        return encode(self._need_tokenizer(), text)
