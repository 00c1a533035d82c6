"""Generation: prompts in, completions out, as text or as token ids."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from quasar_trt.drafters import make_drafter
from quasar_trt.drafters.base import Drafter
from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.outputs import CompletionOutput, RequestOutput, StreamOutput, StreamText
from quasar_trt.request import Request
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.scheduler import Scheduler

Prompt = str | Sequence[int]


class Runner:
    """Drives one engine and at most one drafter. Not for use from several threads at once.

    tokenizer: a transformers tokenizer, or None when only token ids go in and out.
    eos_token_ids: ids that end a request, the model's own first.
    max_batch_size: requests per pass; further ones wait and join as others finish.
    max_draft_len: the most draft tokens per request and pass.

    Raises QuasarError when the drafter may propose more than max_draft_len.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer=None,
        drafter: Drafter | None = None,
        eos_token_ids: Sequence[int] = (),
        max_batch_size: int = 16,
        max_draft_len: int = 16,
    ):
        self.engine = engine
        self.eos_token_ids = tuple(eos_token_ids)
        self._scheduler = Scheduler(engine, drafter, max_batch_size, max_draft_len)
        self._tokenizer = tokenizer
        self._tokenizer_dir: Path | None = None
        self._num_requests = 0

    @classmethod
    def from_dir(
        cls,
        engine_dir: str | Path,
        drafter: str | None = "ngram",
        drafter_options: Mapping[str, object] | None = None,
        engine: str = "auto",
        threads: int | None = None,
    ) -> Runner:
        """A runner for an engine directory, with the directory's limits, tokenizer and end-of-sequence ids.

        The tokenizer is loaded when text is first read or written. Raises QuasarError for a directory that is no engine
        and for an unknown drafter, option or engine.
        """
        from quasar_trt.engines import open_engine
        from quasar_trt.manifest import Manifest

        engine_dir = Path(engine_dir)
        made_drafter = make_drafter(drafter, drafter_options)
        limits = Manifest.open(engine_dir).limits
        runner = cls(
            open_engine(engine_dir, engine=engine, threads=threads),
            drafter=made_drafter,
            max_batch_size=limits.max_batch_size,
            max_draft_len=limits.max_draft_len,
        )
        if (engine_dir / "tokenizer.json").is_file():
            runner._tokenizer_dir = engine_dir
        runner.eos_token_ids = runner._read_eos_token_ids(engine_dir)
        return runner

    @property
    def stats(self) -> SpeculationMetrics:
        """Metrics over all requests of this runner so far."""
        return self._scheduler.stats

    @property
    def tokenizer(self):
        """The tokenizer, loaded on first use; None when the runner was made without one."""
        if self._tokenizer is None and self._tokenizer_dir is not None:
            from quasar_trt.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self._tokenizer_dir)
        return self._tokenizer

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Prompt ids of a conversation [{"role": ..., "content": ...}], through the model's chat template."""
        from quasar_trt.tokenizer import encode_chat

        return encode_chat(self._need_tokenizer(), messages)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Completes one prompt or several, given as text or as token ids; the answers come in the prompts' order.

        Raises QuasarError for a prompt that is empty, too long or has ids outside of the vocabulary, before anything runs.
        """
        requests = [self._request(prompt, sampling_params or SamplingParams()) for prompt in _as_list(prompts)]
        for request in requests:
            self._scheduler.submit(request)
        try:
            for request in requests:
                while request.finish_reason is None:
                    self._scheduler.step()
        finally:
            self._scheduler.release(requests)
        return [self._output(request) for request in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamOutput]:
        """Completes one prompt, step by step; the prompt is checked at once, the work begins with the first piece.

        Raises QuasarError as `generate` does, and from the iterator when the engine gives a row that is no distribution.
        """
        return self._stream(self._request(prompt, sampling_params or SamplingParams()))

    def _stream(self, request: Request) -> Iterator[StreamOutput]:
        texts = StreamText(self._decode)
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
                    yield StreamOutput(new, request.finish_reason, texts.append(new, finished), texts)
            if request.error:
                raise QuasarError(request.error)
        finally:
            self._scheduler.release([request])

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        text = prompt if isinstance(prompt, str) else None
        ids = self._encode(text) if text is not None else [operator.index(token) for token in prompt]
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

    def _read_eos_token_ids(self, engine_dir: Path) -> tuple[int, ...]:
        """What generation_config.json names (an id or a list of them), else the tokenizer's own."""
        ids = None
        if (path := engine_dir / "generation_config.json").is_file():
            ids = json.loads(path.read_text()).get("eos_token_id")
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (ids,)

    def _output(self, request: Request) -> RequestOutput:
        completion = CompletionOutput(0, request.token_ids, request.finish_reason, request.stop_reason, self._decode)
        prompt_ids = request.context[: request.num_prompt_tokens]
        return RequestOutput(request.id, request.prompt, prompt_ids, [completion], request.metrics)

    def _need_tokenizer(self):
        if self.tokenizer is None:
            raise QuasarError("this runner has no tokenizer; give token ids, or a tokenizer to Runner")
        return self.tokenizer

    def _encode(self, text: str) -> list[int]:
        from quasar_trt.tokenizer import encode

        return encode(self._need_tokenizer(), text)

    def _decode(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        from quasar_trt.tokenizer import decode

        return decode(self.tokenizer, ids)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        return [prompts]
    return prompts
