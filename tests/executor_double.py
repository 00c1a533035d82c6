"""A double of `tensorrt_llm.bindings.executor` (release 1.2.1, one host) on the reference engine.

It is strict where the real one is, and raises `Misuse` where the real one would silently do something else.

- The directory holds TensorRT-LLM's config.json {version, pretrained_config, build_config} and a `rank{r}.engine` per rank.
- An engine for external drafts needs block reuse, block reuse needs paged context FMHA.
- What is wrong with a request comes back as a response with an error; settings out of range raise where they are made.
- A request with draft tokens verifies them once and ends. A row's draft token is accepted iff it equals the token sampled from
  the row; in place of the first that is not, the executor *draws again* from the row's distribution, so that above temperature
  0 a drafted token comes too often. With logits of the draft it makes the ratio test instead (acceptance_threshold None: against
  a fresh uniform) and draws from the residual: one-hot logits make that exact for a drafter without probabilities.
- A request without draft tokens runs to max_tokens, its end id or a stop word. An end id is not among the output, a stop word is.
- Without top_k and top_p a request is greedy, whatever its temperature; without a seed its seed is 0. Each request's generator
  starts anew from its seed.
- A nucleus holds its last token with what is left of top_p only; rows that verify a draft hold it whole.
- Presence and frequency count the prompt too, from `prompt_ignore_length` on; all penalties come after temperature. min_tokens
  counts from the request's own prompt.
- max_tokens is cut, without an error, where prompt, max_tokens and draft exceed the engine's max_seq_len.
- Generation logits need the executor's gather_generation_logits; they are [1, emitted tokens, padded vocabulary] with a draft,
  [1, max_tokens, padded vocabulary] without (rows that were not reached are 0), and [tokens, 1, padded vocabulary] in each
  response of a stream.
"""

from __future__ import annotations

import itertools
import json
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import executor_settings
import numpy as np
import torch
from executor_sampling import distribution, draw
from executor_settings import ExecutorConfig, FinishReason, ModelType, Request, Response, Result, require

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel

VERSION = "1.2.1"
NONE, EXTERNAL = 1, 2  # SpeculativeDecodingMode.NONE and .DRAFT_TOKENS_EXTERNAL, flags that JSON shows as numbers
LARGEST_TOP_K = 1024


class Misuse(AssertionError):
    """The real executor would not complain, and not do what was asked either."""


@dataclass
class _Running:
    """A request that verifies or decodes. ids: prompt and output; rows: the logits of every emitted token."""

    id: int
    request: Request
    sequence: int
    ids: list[int]
    max_tokens: int
    generator: np.random.Generator
    sent: int = 0
    rows: list[np.ndarray] = field(default_factory=list)
    reason: FinishReason = FinishReason.NOT_FINISHED

    @property
    def generated(self) -> int:
        return len(self.ids) - len(self.request.input_token_ids)


class ExecutorBase:
    """`Executor`, for the model and the MPI world that `executor_module` gives to a subclass.

    requests: everything that was enqueued; passes: (ids brought, draft tokens) of every sequence in every pass. A resubmitted
    prefix brings only what no finished request has left in whole blocks.
    """

    model: ReferenceModel
    rank: int
    world_size: int

    def __init__(self, model_path: str | Path, model_type: ModelType, executor_config: ExecutorConfig):
        directory = Path(model_path)
        values = json.loads((directory / "config.json").read_text())
        assert {"version", "pretrained_config", "build_config"} <= values.keys(), "no config.json of TensorRT-LLM"
        require(values["version"] == VERSION, f"engine of version {values['version']} in release {VERSION}")
        self.build = values["build_config"]
        mapping = values["pretrained_config"]["mapping"]
        ranks = mapping["world_size"]
        require(ranks == self.world_size, f"mpiSize == tp * pp * cp: {self.world_size} and {ranks}")
        assert (directory / f"rank{self.rank}.engine").is_file(), "no engine of this rank"
        require(model_type is ModelType.DECODER_ONLY, "the model is a decoder")
        require(executor_config.max_beam_width <= self.build["max_beam_width"], "max beam width")
        self.config = executor_config
        self.external = self.build["speculative_decoding_mode"] == EXTERNAL
        reuse = executor_config.kv_cache_config.enable_block_reuse
        if self.external:
            require(reuse, "KV cache block reuse must be enabled for speculative decoding target model")
        if reuse:
            require(
                self.build["plugin_config"]["use_paged_context_fmha"],
                "When KV cache block reuse is set, model has to be built with paged context FMHA support",
            )
        size = self.build["max_batch_size"]
        require((executor_config.max_batch_size or size) <= size, "runtime max_batch_size exceeds the engine's")
        self.max_batch_size = executor_config.max_batch_size or size
        vocab = self.model.config.vocab_size
        self.vocab_padded = -(-vocab // mapping["tp_size"]) * mapping["tp_size"]
        self.engine = ReferenceEngine(
            self.model, max_seq_len=self.build["max_seq_len"], max_rows=10**6, kv_dtype=torch.float32
        )
        self.requests: list[Request] = []
        self.passes: list[list[tuple[int, int]]] = []
        self._ids = itertools.count(1)
        self._waiting: list[tuple[int, Request]] = []
        self._running: list[_Running] = []
        self._responses: list[Response] = []
        self._open: set[int] = set()  # requests whose last response was not taken yet
        self._kept: list[tuple[list[int], int]] = []  # ids in the cache of a finished request, and its sequence
        self._shut = False

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        self._shut = True

    def can_enqueue_requests(self) -> bool:
        return self.rank == 0 and not self._shut

    def enqueue_request(self, request: Request) -> int:
        require(self.can_enqueue_requests(), "only the leader enqueues requests, until the executor shuts down")
        assert isinstance(request, Request)
        request_id = next(self._ids)
        self.requests.append(request)
        self._waiting.append((request_id, request))
        self._open.add(request_id)
        return request_id

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    def cancel_request(self, id: int) -> None:
        for running in [running for running in self._running if running.id == id]:
            running.reason = FinishReason.CANCELLED
            self._finish(running)
        for request_id, request in [entry for entry in self._waiting if entry[0] == id]:
            self._waiting.remove((request_id, request))
            output = [] if request.output_config.exclude_input_from_output else list(request.input_token_ids)
            self._respond(request_id, request, Result(True, [output], [FinishReason.CANCELLED]))

    def get_num_responses_ready(self, id: int | None = None) -> int:
        return sum(id in (None, response.request_id) for response in self._responses)

    def await_responses(self, *arguments, id=None, ids=None, timeout=None):
        """Overloads as in the binding: (timeout), (id, timeout) or (ids, timeout); lists of responses, or one per id."""
        if arguments and isinstance(arguments[0], int):
            id, *_ = arguments
        elif arguments and isinstance(arguments[0], list):
            ids, *_ = arguments
        if ids is not None:
            return [self.await_responses(id=one) for one in ids]
        if id is not None and id not in self._open:
            raise RuntimeError(f"[TensorRT-LLM][ERROR] request id {id} is unknown or was answered already")
        while not self.get_num_responses_ready(id) and (self._waiting or self._running):
            self._iterate()
        ready = [response for response in self._responses if id in (None, response.request_id)]
        self._responses = [response for response in self._responses if response not in ready]
        self._open -= {r.request_id for r in ready if r.has_error() or r.result.is_final}
        return ready

    def _iterate(self) -> None:
        """One pass of in-flight batching: waiting requests bring their prompts, running ones their last token."""
        while self._waiting and len(self._running) < self.max_batch_size:
            request_id, request = self._waiting.pop(0)
            try:
                self._running.append(self._start(request_id, request))
            except RuntimeError as error:
                message = f"Encountered an error when fetching new request: {error}"
                self._responses.append(Response(request_id, message, None, request.client_id))
        batch = []
        for running in self._running:
            drafts = running.request.external_draft_tokens_config
            draft = Draft(tuple(drafts.tokens)) if drafts else Draft()
            batch.append(SequenceStep(running.sequence, running.ids[self.engine.length(running.sequence) :], draft))
        if not batch:
            return
        self.passes.append([(len(entry.tokens), len(entry.draft)) for entry in batch])
        self.engine.step(batch, lambda index, logits: self._accept(self._running[index], logits))
        for running in list(self._running):
            if running.reason is not FinishReason.NOT_FINISHED or running.request.external_draft_tokens_config:
                self._finish(running)
            elif running.request.streaming:
                self._send(running, is_final=False)

    def _start(self, request_id: int, request: Request) -> _Running:
        sampling, output, drafts = request.sampling_config, request.output_config, request.external_draft_tokens_config
        prompt, max_seq_len, vocab = (
            len(request.input_token_ids),
            self.build["max_seq_len"],
            self.model.config.vocab_size,
        )
        ids = [*request.input_token_ids, *(drafts.tokens if drafts else ())]
        if not all(0 <= token < vocab for token in ids):
            raise Misuse("a token id is outside of the vocabulary: the embedding would read other memory")
        require(sampling.beam_width <= self.config.max_beam_width, "beam width exceeds the executor's maximum")
        if sampling.num_return_sequences not in (None, 1) or output.return_context_logits or output.return_log_probs:
            raise Misuse("this double knows one sequence per request, and no context logits or log probabilities")
        if sampling.top_k is not None and sampling.top_k > LARGEST_TOP_K:
            raise Misuse(f"top_k above {LARGEST_TOP_K} is cut to it")
        if self.external and sampling.min_p:
            raise Misuse("the sampling of engines for external drafts does not read min_p")
        require(prompt < max_seq_len, f"Prompt length ({prompt}) exceeds maximum input length ({max_seq_len - 1})")
        drafted = self.build["max_draft_len"]
        if drafts:
            require(self.external, "the engine was not built for external draft tokens")
            drafted = len(drafts.tokens)
            most = self.build["max_draft_len"]
            require(drafted <= most, f"Draft tokens length ({drafted}) exceeds maximum draft tokens length ({most}).")
            if prompt + drafted > max_seq_len - 1:
                raise Misuse("draft tokens beyond the maximum input length are dropped")
            if drafts.logits is not None:
                found = drafts.logits.shape[1]
                require(found == self.vocab_padded, f"draft logits of {found} columns, vocabulary {self.vocab_padded}")
                require(drafts.logits.dtype is torch.float32, "draft logits are of another type than the engine's")
        if output.return_generation_logits:
            require(
                self.config.gather_generation_logits,
                "To return generation logits, gather_generation_logits must be enabled in ExecutorConfig",
            )
        if request.embedding_bias is not None:
            require(request.embedding_bias.shape == (vocab,), "The embedding bias shape is not as expected")
        generator = np.random.default_rng(sampling.seed or 0)
        most = min(request.max_tokens, max_seq_len - prompt - drafted)
        return _Running(request_id, request, self._sequence(ids[:prompt]), ids[:prompt], most, generator)

    def _sequence(self, prompt: list[int]) -> int:
        """A sequence that holds the longest prefix of the prompt, in whole blocks and short of its last id, that was kept."""
        block = self.build["plugin_config"]["tokens_per_block"]
        best, source = 0, None
        for ids, sequence in self._kept if self.config.kv_cache_config.enable_block_reuse else ():
            same = next(
                (i for i, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b), min(len(ids), len(prompt))
            )
            whole = min(same, len(prompt) - 1) // block * block
            if whole > best:
                best, source = whole, sequence
        if source is None:
            return self.engine.open()
        copy = self.engine.fork(source)
        self.engine.truncate(copy, best)
        return copy

    def _accept(self, running: _Running, logits: np.ndarray) -> Acceptance:
        drafts = running.request.external_draft_tokens_config
        accepted = 0
        for row, values in enumerate(logits):
            p = distribution(running.request, running.ids, values)
            token, kept = draw(p, running.generator), False
            if drafts and row < len(drafts.tokens):
                drafted = drafts.tokens[row]
                if drafts.logits is None:
                    kept = token == drafted
                else:
                    q = torch.softmax(drafts.logits[row], dim=-1).double().numpy()[: len(p)]
                    threshold = drafts.acceptance_threshold or running.generator.random()
                    kept = p[drafted] > threshold * q[drafted]
                    if not kept:
                        p = np.maximum(p - q, 0)
                token = drafted if kept else draw(p, running.generator)
            if token == running.request.end_id:
                running.reason = FinishReason.END_ID
                break
            running.ids.append(token)
            running.rows.append(values.copy())
            accepted += kept
            if any(running.ids[-len(word) :] == word for word in running.request.stop_words or ()):
                running.reason = FinishReason.STOP_WORDS
            elif running.generated >= running.max_tokens:
                running.reason = FinishReason.LENGTH
            if not kept or running.reason is not FinishReason.NOT_FINISHED:
                break
        return Acceptance((), accepted)

    def _finish(self, running: _Running) -> None:
        self._running.remove(running)
        self._kept.append((running.ids[: self.engine.length(running.sequence)], running.sequence))
        self._send(running, is_final=True)

    def _send(self, running: _Running, is_final: bool) -> None:
        request = running.request
        first = running.sent
        if request.streaming:
            output = running.ids[len(request.input_token_ids) + first :]
            running.sent += len(output)
        else:
            output = running.ids[len(request.input_token_ids) :]
        if not request.output_config.exclude_input_from_output and not request.streaming:
            output = request.input_token_ids + output
        result = Result(is_final, [output], [running.reason])
        if request.output_config.return_generation_logits and request.streaming:
            result.generation_logits = self._logits(running.rows[first:], len(output))[:, None]
        elif request.output_config.return_generation_logits:
            count = running.generated if request.external_draft_tokens_config else request.max_tokens
            result.generation_logits = self._logits(running.rows, count)[None]
        self._respond(running.id, request, result)

    def _logits(self, rows: list[np.ndarray], count: int) -> torch.Tensor:
        logits = torch.zeros(count, self.vocab_padded)
        for index, row in enumerate(rows):
            logits[index, : len(row)] = torch.from_numpy(row)
        return logits

    def _respond(self, request_id: int, request: Request, result: Result) -> None:
        self._responses.append(Response(request_id, None, result, request.client_id))


def executor_module(model: ReferenceModel, *, rank: int = 0, world_size: int = 1) -> types.ModuleType:
    """The module `tensorrt_llm.bindings.executor` as process `rank` of an MPI world imports it; its engines run `model`."""
    module = types.ModuleType("tensorrt_llm.bindings.executor")
    module.__dict__.update({name: kind for name, kind in vars(executor_settings).items() if name[0].isupper()})
    attributes = {"model": model, "rank": rank, "world_size": world_size}
    module.Executor = type("Executor", (ExecutorBase,), attributes)
    module.__version__ = VERSION
    return module


@contextmanager
def executor_double(model: ReferenceModel, *, rank: int = 0, world_size: int = 1) -> Iterator[types.ModuleType]:
    """While it lasts, `import tensorrt_llm` gives a package with nothing but these bindings; yields them."""
    package, bindings = types.ModuleType("tensorrt_llm"), types.ModuleType("tensorrt_llm.bindings")
    package.__path__, bindings.__path__ = [], []
    package.__version__, package.bindings = VERSION, bindings
    bindings.executor = executor_module(model, rank=rank, world_size=world_size)
    names = {module.__name__: module for module in (package, bindings, bindings.executor)}
    assert not names.keys() & sys.modules.keys()
    sys.modules.update(names)
    try:
        yield bindings.executor
    finally:
        for name in names:
            del sys.modules[name]


def write_llm_engine(
    directory: Path,
    *,
    max_batch_size: int = 4,
    max_seq_len: int = 64,
    max_draft_len: int = 0,
    tp_size: int = 1,
    **build_config,
) -> Path:
    """A directory as TensorRT-LLM's build leaves it, its engines empty. max_draft_len: above 0 for external drafts, and then
    added to max_seq_len."""
    directory.mkdir(parents=True, exist_ok=True)
    values = {
        "version": VERSION,
        "pretrained_config": {"mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1}},
        "build_config": {
            "max_batch_size": max_batch_size,
            "max_seq_len": max_seq_len + max_draft_len,
            "max_beam_width": 1,
            "max_draft_len": max_draft_len,
            "speculative_decoding_mode": EXTERNAL if max_draft_len else NONE,
            "plugin_config": {"use_paged_context_fmha": True, "tokens_per_block": 32},
        }
        | build_config,
    }
    (directory / "config.json").write_text(json.dumps(values))
    for rank in range(tp_size):
        (directory / f"rank{rank}.engine").write_bytes(b"plan")
    return directory
