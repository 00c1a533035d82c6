"""Generation: prompts in, completions out, as text or as token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from operator import add
from pathlib import Path

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.drafters import make_drafter
from quasar_trt.drafters.base import Drafter
from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.generation_config import GenerationConfig
from quasar_trt.logprobs import Logprob, by_token
from quasar_trt.machine import cpu_model, native_build, usable_cpus, version_of
from quasar_trt.manifest import Manifest
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.outputs import CompletionOutput, RequestOutput, StreamOutput
from quasar_trt.prompts import Prompt, as_list, token_ids
from quasar_trt.request import Request
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.scheduler import Scheduler
from quasar_trt.step_cost import StepCost


class Runner:
    """Drives one engine and at most one drafter. Not for use from several threads at once.

    tokenizer: a transformers tokenizer, the directory that one is loaded from when text is first read or written, or None
        when only token ids go in and out.
    eos_token_ids: ids that end a request, the model's own first; None for the tokenizer's own, if there is one.
    default_sampling_params: for requests that come without; None for SamplingParams().
    max_batch_size: requests per pass; further ones wait and join as others finish.
    max_draft_len: the most draft tokens per request and pass.
    step_cost: by which draft lengths are chosen, so that drafting pays; None verifies every draft whole.

    Raises QuasarError for limits that leave nothing to do and when the drafter may propose more than max_draft_len.
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
    ):
        self.engine = engine
        self._scheduler = Scheduler(engine, drafter, max_batch_size, max_draft_len, step_cost)
        self._tokenizer = tokenizer
        if eos_token_ids is None:
            own = None if self.tokenizer is None else self.tokenizer.eos_token_id
            eos_token_ids = () if own is None else (own,)
        self.eos_token_ids = tuple(eos_token_ids)
        self.default_sampling_params = default_sampling_params or SamplingParams()
        self._num_requests = 0

    @classmethod
    def from_dir(
        cls,
        engine_dir: str | Path,
        drafter: str | None = "suffix",
        drafter_options: Mapping[str, object] | None = None,
        engine: str = "auto",
        threads: int | None = None,
    ) -> Runner:
        """A runner for an engine directory, with its limits, tokenizer, end-of-sequence ids and default sampling parameters.

        The tokenizer is loaded when it is first needed. With a drafter, the costs of the engine's passes are measured the
        first time that this engine is opened on this machine, mostly within half a second. Raises QuasarError for a
        directory that is no engine or is damaged, and for an unknown drafter, option or engine.
        """
        from quasar_trt.engines import open_engine

        engine_dir = Path(engine_dir)
        made_drafter = make_drafter(drafter, drafter_options)
        manifest = Manifest.open(engine_dir)
        limits = manifest.limits
        generation = GenerationConfig.read(engine_dir)
        opened = open_engine(engine_dir, engine=engine, threads=threads)
        step_cost = None if made_drafter is None else _step_cost(opened, manifest)
        return cls(
            opened,
            tokenizer=engine_dir if (engine_dir / "tokenizer.json").is_file() else None,
            drafter=made_drafter,
            eos_token_ids=generation.eos_token_ids,
            default_sampling_params=SamplingParams(**generation.sampling),
            max_batch_size=limits.max_batch_size,
            max_draft_len=limits.max_draft_len,
            step_cost=step_cost,
        )

    @property
    def stats(self) -> SpeculationMetrics:
        """Metrics over all requests of this runner so far."""
        return self._scheduler.stats

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
    ) -> list[RequestOutput]:
        """Completes one prompt or several, given as text or as token ids; the answers come in the prompts' order.

        sampling_params: for every prompt, or a list of one per prompt; `default_sampling_params` where None.

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
        families = [self._requests(*pair) for pair in zip(prompts, sampling_params, strict=True)]
        requests = list(chain.from_iterable(families))
        for request in requests:
            self._scheduler.submit(request)
        try:
            for request in requests:
                while request.finish_reason is None:
                    self._scheduler.step()
        finally:
            self._scheduler.release(requests)
        return [self._output(family) for family in families]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation [{"role": ..., "content": ...}] or a list of them; the rest is as in `generate`."""
        several = isinstance(messages, Sequence) and messages and isinstance(messages[0], list | tuple)
        return self.generate([self.chat_ids(each) for each in (messages if several else [messages])], sampling_params)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, detokenize: bool = True
    ) -> Iterator[StreamOutput]:
        """Completes one prompt, step by step; the prompt is checked at once, the work begins with the first piece.

        detokenize: False leaves the text of the pieces empty, for whoever wants ids only.

        The texts of a completion's pieces join to its text. Raises QuasarError as `generate` does, and from the iterator
        when the engine gives a row that is no distribution.
        """
        return self._stream(self._requests(prompt, sampling_params, detokenize), detokenize)

    def _stream(self, requests: list[Request], detokenize: bool) -> Iterator[StreamOutput]:
        seen = {request: request.num_prompt_tokens for request in requests}  # of those that go on
        for request in requests:
            self._scheduler.submit(request)
        try:
            while seen:
                if not any(len(request.context) > count or request.finish_reason for request, count in seen.items()):
                    self._scheduler.step()  # otherwise a neighbour has advanced one of them
                for request, count in list(seen.items()):
                    if new := request.context[count:]:
                        seen[request] += len(new)
                        yield self._piece(request, new, detokenize)
                    if request.error:
                        raise QuasarError(request.error)
                    if request.finish_reason and seen[request] == len(request.context):
                        del seen[request]
        finally:
            self._scheduler.release(requests)

    def _piece(self, request: Request, new: list[int], detokenize: bool) -> StreamOutput:
        detokenizer = request.stop.detokenizer if detokenize else None
        return StreamOutput(
            detokenizer.say() if detokenizer else "",
            new,
            request.finish_reason,
            request.stop_reason,
            self._logprobs(request, len(request.token_ids) - len(new)),
            request.sample_index,
        )

    def _requests(self, prompt: Prompt, params: SamplingParams | None, detokenize: bool = False) -> list[Request]:
        """One for each of the prompt's completions. detokenize: the text is wanted as the tokens come."""
        params = self.default_sampling_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise QuasarError(
                f"sampling_params is {reprlib.repr(params)}; allowed: SamplingParams; generate also takes a list of one per prompt"
            )
        text = prompt if isinstance(prompt, str) else None
        ids = self._encode(text) if text is not None else token_ids(prompt)
        max_seq_len = self.engine.max_seq_len
        if not ids:
            raise QuasarError("the prompt has no tokens; give at least one")
        if len(ids) >= max_seq_len:
            raise QuasarError(
                f"the prompt has {len(ids)} tokens; allowed: at most {max_seq_len - 1}, one less than the engine's "
                "max_seq_len; shorten it or build with a larger --max-seq-len"
            )
        self._check_ids("the prompt", ids, "; was another tokenizer used?")
        bad_words = self._check_params(params)
        detokenize = bool(params.stop) or (detokenize and self.tokenizer is not None)
        requests = []
        for index in range(params.n):
            detokenizer = self._detokenizer(params) if detokenize else None
            requests.append(
                Request(
                    self._num_requests,
                    text,
                    ids,
                    params,
                    self.eos_token_ids,
                    max_seq_len,
                    sample_index=index,
                    detokenizer=detokenizer,
                    bad_words=bad_words,
                )
            )
            self._num_requests += 1
        for request in requests:
            request.siblings = requests
        return requests

    def _check_params(self, params: SamplingParams) -> list[list[int]]:
        """The ids of each bad word. Raises QuasarError for parameters that do not fit the model."""
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

    def _output(self, requests: list[Request]) -> RequestOutput:
        first = requests[0]
        scored = None
        if first.params.prompt_logprobs is not None and len(first.prompt_logprobs) == first.num_prompt_tokens - 1:
            scored = [None, *(by_token(entry, self._decode_token) for entry in first.prompt_logprobs)]
        return RequestOutput(
            first.id,
            first.prompt,
            first.context[: first.num_prompt_tokens],
            scored,
            [
                CompletionOutput(
                    request.sample_index,
                    request.token_ids,
                    request.finish_reason,
                    request.stop_reason,
                    self._logprobs(request),
                    partial(self._text, request),
                )
                for request in requests
            ],
            reduce(add, [request.metrics for request in requests]),
        )

    def _logprobs(self, request: Request, first: int = 0) -> list[dict[int, Logprob]] | None:
        """Of the emitted ids from the one of this index on."""
        if request.params.logprobs is None:
            return None
        return [by_token(entry, self._decode_token) for entry in request.logprobs[first:]]

    def _text(self, request: Request) -> str:
        detokenizer = request.stop.detokenizer
        if detokenizer is None:
            if self.tokenizer is None:
                return ""
            detokenizer = self._detokenizer(request.params)
            for token in request.token_ids[:-1] if request.stop.ends_with_id else request.token_ids:
                detokenizer.push(token)
        detokenizer.end()
        return detokenizer.text

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        from quasar_trt.tokenizer import decode

        special = {"skip_special_tokens": params.skip_special_tokens}
        return Detokenizer(partial(decode, self.tokenizer, **special), params.stop, params.include_stop_str_in_output)

    def _decode_token(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        from quasar_trt.tokenizer import decode

        return decode(self.tokenizer, [token], skip_special_tokens=False)

    def _need_tokenizer(self):
        if self.tokenizer is None:
            raise QuasarError(
                "this engine has no tokenizer (tokenizer.json); give token ids, or build it from a model that has one"
            )
        return self.tokenizer

    def _encode(self, text: str) -> list[int]:
        from quasar_trt.tokenizer import encode

        return encode(self._need_tokenizer(), text)


def _step_cost(engine: Engine, manifest: Manifest) -> StepCost:
    """The costs of the engine's passes; they depend on the engine, the program and the machine."""
    names = [
        *sorted(record.header_sha256 for record in manifest.files.values()),
        type(engine).__name__,
        getattr(engine, "threads", None),  # of engines that have them
        getattr(engine, "isa", None),
        version_of("quasar-trt"),
        native_build(),
        cpu_model(),
        usable_cpus(),
        manifest.limits.max_draft_len,
    ]
    return StepCost.open(engine, manifest.limits.max_draft_len, names)
