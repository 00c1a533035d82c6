"""Generation: prompts in, completions out, as text or as token ids."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.drafters import make_drafter
from quasar_trt.drafters.base import Drafter
from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.machine import cpu_model, native_build, usable_cpus, version_of
from quasar_trt.manifest import Manifest
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.outputs import CompletionOutput, RequestOutput, StreamOutput
from quasar_trt.request import Request
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.scheduler import Scheduler
from quasar_trt.step_cost import StepCost

Prompt = str | Sequence[int]


class Runner:
    """Drives one engine and at most one drafter. Not for use from several threads at once.

    tokenizer: a transformers tokenizer, the directory that one is loaded from when text is first read or written, or None
        when only token ids go in and out.
    eos_token_ids: ids that end a request, the model's own first; None for the tokenizer's own, if there is one.
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
        """A runner for an engine directory, with the directory's limits, tokenizer and end-of-sequence ids.

        The tokenizer is loaded when it is first needed. With a drafter, the costs of the engine's passes are measured the
        first time that this engine is opened on this machine, mostly within half a second. Raises QuasarError for a
        directory that is no engine or is damaged, and for an unknown drafter, option or engine.
        """
        from quasar_trt.engines import open_engine

        engine_dir = Path(engine_dir)
        made_drafter = make_drafter(drafter, drafter_options)
        manifest = Manifest.open(engine_dir)
        limits = manifest.limits
        eos_token_ids = _read_eos_token_ids(engine_dir)
        opened = open_engine(engine_dir, engine=engine, threads=threads)
        step_cost = None if made_drafter is None else _step_cost(opened, manifest)
        return cls(
            opened,
            tokenizer=engine_dir if (engine_dir / "tokenizer.json").is_file() else None,
            drafter=made_drafter,
            eos_token_ids=eos_token_ids,
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

        sampling_params: for every prompt, or a list of one per prompt; the defaults when None.

        Raises QuasarError for a prompt that is empty, too long, of another type or has ids outside of the vocabulary, and
        for sampling parameters that do not match the prompts, before anything runs.
        """
        prompts = _as_list(prompts)
        if not isinstance(sampling_params, list | tuple):
            sampling_params = [sampling_params] * len(prompts)
        elif len(sampling_params) != len(prompts):
            raise QuasarError(
                f"sampling_params has {len(sampling_params)} entries; allowed: one per prompt, {len(prompts)}"
            )
        requests = [self._request(*pair) for pair in zip(prompts, sampling_params, strict=True)]
        for request in requests:
            self._scheduler.submit(request)
        try:
            for request in requests:
                while request.finish_reason is None:
                    self._scheduler.step()
        finally:
            self._scheduler.release(requests)
        return [self._output(request) for request in requests]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, detokenize: bool = True
    ) -> Iterator[StreamOutput]:
        """Completes one prompt, step by step; the prompt is checked at once, the work begins with the first piece.

        detokenize: False leaves the text of the pieces empty, for whoever wants ids only.

        Raises QuasarError as `generate` does, and from the iterator when the engine gives a row that is no distribution.
        """
        return self._stream(self._request(prompt, sampling_params), detokenize)

    def _stream(self, request: Request, detokenize: bool) -> Iterator[StreamOutput]:
        detokenizer = Detokenizer(self._decode)
        seen = request.num_prompt_tokens
        self._scheduler.submit(request)
        finished = False
        try:
            while not finished:
                if seen == len(request.context) and request.finish_reason is None:  # a neighbour may have advanced it
                    self._scheduler.step()
                new = request.context[seen:]
                finished = request.finish_reason is not None
                if new:
                    seen += len(new)
                    text = detokenizer.push(new, final=finished) if detokenize else ""
                    yield StreamOutput(text, new, request.finish_reason)
            if request.error:
                raise QuasarError(request.error)
        finally:
            self._scheduler.release([request])

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise QuasarError(
                f"sampling_params is {reprlib.repr(params)}; allowed: SamplingParams; generate also takes a list of one per prompt"
            )
        text = prompt if isinstance(prompt, str) else None
        ids = self._encode(text) if text is not None else _token_ids(prompt)
        max_seq_len, vocab = self.engine.max_seq_len, self.engine.config.vocab_size
        if not ids:
            raise QuasarError("the prompt has no tokens; give at least one")
        if len(ids) >= max_seq_len:
            raise QuasarError(
                f"the prompt has {len(ids)} tokens; allowed: at most {max_seq_len - 1}, one less than the engine's "
                "max_seq_len; shorten it or build with a larger --max-seq-len"
            )
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(token for token in ids if not 0 <= token < vocab)
            raise QuasarError(
                f"the prompt has token id {wrong}; allowed: 0 to {vocab - 1}; was another tokenizer used?"
            )
        self._num_requests += 1
        return Request(self._num_requests - 1, text, ids, params, self.eos_token_ids, max_seq_len)

    def _output(self, request: Request) -> RequestOutput:
        completion = CompletionOutput(0, request.token_ids, request.finish_reason, request.stop_reason, self._decode)
        prompt_ids = request.context[: request.num_prompt_tokens]
        return RequestOutput(request.id, request.prompt, prompt_ids, [completion], request.metrics)

    def _need_tokenizer(self):
        if self.tokenizer is None:
            raise QuasarError(
                "this engine has no tokenizer (tokenizer.json); give token ids, or build it from a model that has one"
            )
        return self.tokenizer

    def _encode(self, text: str) -> list[int]:
        from quasar_trt.tokenizer import encode

        return encode(self._need_tokenizer(), text)

    def _decode(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        from quasar_trt.tokenizer import decode

        return decode(self.tokenizer, ids)


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


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts one by one; what is neither a prompt nor a sequence of prompts comes as one, to be refused."""
    prompts = _plain(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        return [prompts]
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Raises QuasarError for anything but a sequence of integers."""
    ids = _plain(prompt)
    if isinstance(ids, Sequence) and not isinstance(ids, bytes) and all(isinstance(token, Integral) for token in ids):
        return [int(token) for token in ids]
    raise QuasarError(f"a prompt is {reprlib.repr(prompt)}; allowed: text, or a list of integer token ids")


def _plain(values):
    """Arrays as lists, everything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _read_eos_token_ids(engine_dir: Path) -> list[int] | None:
    """The end-of-sequence ids that generation_config.json names, if it does; it gives one id or a list of them.

    Raises QuasarError when the file says something else.
    """
    path = engine_dir / "generation_config.json"
    if not path.is_file():
        return None
    try:
        named = json.loads(path.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError):
        raise QuasarError(f"{path} is damaged: it is no JSON object; build the engine again") from None
    if named is None:
        return None
    ids = named if isinstance(named, list) else [named]
    if not all(type(token) is int for token in ids):
        raise QuasarError(
            f"{path} is damaged: eos_token_id is {reprlib.repr(named)}; allowed: an integer or a list of them; "
            "build the engine again"
        )
    return ids
