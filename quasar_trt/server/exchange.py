"""One HTTP request on its way to its completions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Iterator
from time import perf_counter, time

from starlette.responses import JSONResponse

from quasar_trt.errors import QuasarError, RequestFailed
from quasar_trt.metrics import SpeculationMetrics, stats_line
from quasar_trt.outputs import StreamOutput
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.server.backend import Backend
from quasar_trt.server.errors import LOG, api_error
from quasar_trt.server.merge import all_of, merged
from quasar_trt.server.protocol import Sampling
from quasar_trt.server.shapes import Shape
from quasar_trt.server.sse import DONE, EventStream, event
from quasar_trt.server.usage import usage


class Exchange:
    """Asks the runner for what `request` wants and puts it into shape."""

    def __init__(self, backend: Backend, request: Sampling, params: SamplingParams, shape: Shape):
        self._backend = backend
        self._request = request
        self._params = params
        self._shape = shape
        self._options = {"timeout": backend.options.request_timeout, "drafts": backend.drafts(request.drafter)}
        self._id = f"{shape.prefix}{uuid.uuid4().hex}"
        self._created = int(time())
        self._began = perf_counter()
        self._num_prompt_tokens = sum(map(len, shape.prompts))
        self._metrics = SpeculationMetrics()
        self._reasons: list[str] = []

    async def response(self) -> JSONResponse | EventStream:
        """Raises what refuses or ends the request before its answer begins."""
        return await (self._stream() if self._request.stream else self._whole())

    async def _whole(self) -> JSONResponse:
        generate, params = self._backend.runner.generate, self._params
        with self._reported():
            answers = await all_of([generate(prompt, params, **self._options) for prompt in self._shape.prompts])
            choices = []
            for index, answer in enumerate(answers):
                self._metrics += answer.metrics
                for output in answer.outputs:
                    self._reasons.append(output.finish_reason)
                    if output.finish_reason == "error":
                        raise RequestFailed(str(output.stop_reason))
                    choices.append(self._shape.choice(index, answer, output))
        return JSONResponse(self._body(self._shape.whole, choices) | {"usage": self._usage()})

    async def _stream(self) -> EventStream:
        stream, params = self._backend.runner.stream, self._params
        pieces = merged([stream(prompt, params, **self._options) for prompt in self._shape.prompts])
        try:
            first = await anext(pieces)
        except BaseException as error:
            self._report(error)
            raise
        return EventStream(self._events(first, pieces))

    async def _events(self, first: tuple[int, StreamOutput], pieces) -> AsyncIterator[bytes]:
        shown = self._request.stream_options is not None and self._request.stream_options.include_usage
        no_usage = {"usage": None} if shown else {}
        body = self._body(self._shape.piece, [])
        with self._reported():
            async with contextlib.aclosing(pieces):
                try:
                    async for prompt, piece in _behind(first, pieces):
                        if piece.metrics:
                            self._metrics += piece.metrics
                            self._reasons.append(piece.finish_reason)
                        if choice := self._shape.delta(prompt, piece):
                            yield event(body | {"choices": [choice]} | no_usage)
                    if shown:
                        yield event(body | {"usage": self._usage()})
                except Exception as error:  # the status line is gone: what went wrong is told as an event
                    yield event(api_error(error).body())
        yield DONE

    def _body(self, kind: str, choices: list[dict]) -> dict[str, object]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._backend.options.served_model_name,
            "choices": choices,
        }

    def _usage(self) -> dict[str, object]:
        return usage(self._num_prompt_tokens, self._metrics)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._report(error)
            raise
        self._report(None)

    def _report(self, error: BaseException | None) -> None:
        """One line in the log once nothing more comes, unless the request was refused."""
        if isinstance(error, QuasarError) and not isinstance(error, RequestFailed):
            return
        seconds = perf_counter() - self._began
        emitted = self._metrics.num_emitted_tokens
        missing = len(self._shape.prompts) * self._params.n - len(self._reasons)
        gone = isinstance(error, asyncio.CancelledError | GeneratorExit)
        reasons = self._reasons + ["disconnected" if gone else "error"] * missing
        self._backend.metrics.count_completions(self._num_prompt_tokens, reasons)
        LOG.info(
            "%s%s: %d prompt tokens, %d emitted in %.3f s, %s, %s",
            self._id,
            f" of {self._request.user!r}" if self._request.user else "",
            self._num_prompt_tokens,
            emitted,
            seconds,
            "+".join(reasons),
            stats_line(self._metrics, emitted / seconds if emitted else None),
        )


async def _behind(first, rest) -> AsyncIterator:
    yield first
    async for each in rest:
        yield each


def scored(params: SamplingParams) -> SamplingParams:
    """The same with log probabilities of the prompt, as many as of the completion."""
    return dataclasses.replace(params, prompt_logprobs=params.logprobs)
