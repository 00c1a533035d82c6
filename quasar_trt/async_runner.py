"""`Runner` for servers: coroutines ask, one thread owns the runner and advances everything that was asked together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread

from quasar_trt.errors import QuasarError, RunnerBusy
from quasar_trt.generation import Generation
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.outputs import RequestOutput, StreamOutput
from quasar_trt.prompts import Prompt
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.service_metrics import Load, ServiceMetrics


class _Job:
    """One prompt. The event loop has the request id and the inbox of answers, the engine thread has the generation."""

    def __init__(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, timeout: float | None, streams: bool
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.timeout = timeout
        self.streams = streams
        self.generation: Generation | None = None
        self.answers: asyncio.Queue[StreamOutput | RequestOutput | BaseException | None] = asyncio.Queue()

    async def answer(self) -> StreamOutput | RequestOutput | None:
        """The next one; None after the last piece. Raises what went wrong."""
        answer = await self.answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class AsyncRunner:
    """Generation for many callers at once, to be made within a running event loop and used from that loop alone.

    runner: nobody else may use it until `shutdown` is over.
    max_requests: prompts that are answered or wait at a time; a further one is refused with RunnerBusy.

    As a context manager it is shut down at the end: all that was asked is answered first, unless an exception leaves it.
    """

    def __init__(self, runner: Runner, *, max_requests: int = 256):
        if max_requests < 1:
            raise QuasarError(f"max_requests is {max_requests}; allowed: 1 or more")
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._max_requests = max_requests
        self._open: dict[str, _Job] = {}  # whose last answer has not come
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._questions: set[_Job] = set()  # that `_ask` waits for
        self._num_asked = 0
        self._closed = False
        self._failure: QuasarError | None = None  # what ended the engine thread
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # for the engine thread; None ends it
        self._running: list[_Job] = []  # the engine thread's
        self._thread = Thread(target=self._run, name="quasar-trt engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> RequestOutput:
        """Completes one prompt. Cancelling the task aborts the request.

        request_id: a name of the caller's own for `abort`.
        timeout: seconds after which it ends with finish_reason "timeout" and what there is of it.

        Raises QuasarError as `Runner.generate` does and after `shutdown`, RunnerBusy, and whatever the engine raised.
        """
        async with self._job(prompt, sampling_params, request_id, timeout, streams=False) as job:
            return await job.answer()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[StreamOutput]:
        """Completes one prompt, piece by piece. Closing the iterator (`contextlib.aclosing`) aborts the request.

        Parameters and errors as in `generate`. A slow reader holds up nobody: what it has not read waits for it.
        """
        async with self._job(prompt, sampling_params, request_id, timeout, streams=True) as job:
            while (piece := await job.answer()) is not None:
                yield piece

    async def abort(self, request_id: str) -> None:
        """Ends a request at any time: its caller gets what there is of it, with finish_reason "abort". One that has ended
        or never was is left alone."""
        if (job := self._open.get(request_id)) is not None:
            self._commands.put(partial(self._abort, job))

    async def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """As `Runner.chat_ids`."""
        return await self._ask(partial(self._runner.chat_ids, messages))

    async def metrics(self) -> tuple[SpeculationMetrics, ServiceMetrics, Load]:
        """Snapshots of the runner's `stats`, `service` and `load`, all of one moment."""
        runner = self._runner
        return await self._ask(lambda: (runner.stats.snapshot(), runner.service.snapshot(), runner.load))

    async def shutdown(self, drain: bool = True) -> None:
        """Takes no more prompts, waits for the answers to all others, and ends the thread. drain: False aborts them first.

        Where it is cancelled, it may be called again, also with drain=False.
        """
        self._closed = True
        if not drain:
            for request_id in list(self._open):
                await self.abort(request_id)
        await self._none_open.wait()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncRunner:
        return self

    async def __aexit__(self, kind, *_) -> None:
        await self.shutdown(drain=kind is None)

    # In the event loop.

    @contextlib.asynccontextmanager
    async def _job(self, prompt, params, request_id: str | None, timeout: float | None, streams: bool):
        if request_id is None:
            request_id = f"request {self._num_asked}"
        if request_id in self._open:
            raise QuasarError(f"request_id is '{request_id}', which has not ended; give each request its own")
        self._check_open()
        if len(self._open) >= self._max_requests:
            raise RunnerBusy(f"{len(self._open)} requests are open; allowed: {self._max_requests}; ask again later")
        self._num_asked += 1
        job = self._open[request_id] = _Job(request_id, prompt, params, timeout, streams)
        self._none_open.clear()
        self._commands.put(partial(self._begin, job))
        try:
            yield job
        finally:
            if self._open.get(request_id) is job:
                await self.abort(request_id)

    def _check_open(self) -> None:
        if self._failure:
            raise self._failure
        if self._closed:
            raise QuasarError("the runner is shut down; make another")

    async def _ask(self, question: Callable[[], object]):
        self._check_open()
        job = _Job("", "", None, None, False)

        def command() -> None:
            try:
                answer = question()
            except Exception as error:
                answer = error
            self._loop.call_soon_threadsafe(job.answers.put_nowait, answer)

        self._questions.add(job)
        self._commands.put(command)
        try:
            return await job.answer()
        finally:
            self._questions.discard(job)

    def _end(self, job: _Job, answer: RequestOutput | BaseException | None) -> None:
        job.answers.put_nowait(answer)
        del self._open[job.request_id]
        if not self._open:
            self._none_open.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = QuasarError(f"the engine thread has ended: {error!r}; make another runner")
        self._failure.__cause__ = error
        for job in list(self._open.values()):
            self._end(job, self._failure)
        for job in self._questions:
            job.answers.put_nowait(self._failure)

    # In the engine thread.

    def _run(self) -> None:
        try:
            while True:
                while not self._running or not self._commands.empty():
                    command = self._commands.get()
                    if command is None:
                        return
                    command()
                self._advance()
        except BaseException as error:
            # Beyond a pass that failed: nobody shall wait for an answer that never comes. The loop may be gone too.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail, error)

    def _begin(self, job: _Job) -> None:
        try:
            job.generation = self._runner.prepare(job.prompt, job.params, detokenize=job.streams, timeout=job.timeout)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._end, job, error)
            return
        self._runner.submit(job.generation)
        self._running.append(job)

    def _abort(self, job: _Job) -> None:
        if job in self._running:
            self._runner.abort(job.generation)

    def _advance(self) -> None:
        self._tell()  # those that were aborted
        if not self._running:
            return
        try:
            self._runner.step()
        except Exception as error:
            for job in self._running:
                self._runner.abort(job.generation)
                self._loop.call_soon_threadsafe(self._end, job, error)
            self._running.clear()
        self._tell()

    def _tell(self) -> None:
        for job in list(self._running):
            try:
                if job.streams:
                    for piece in job.generation.pieces():
                        self._loop.call_soon_threadsafe(job.answers.put_nowait, piece)
                    ended, answer = job.generation.is_told, None
                else:
                    ended = job.generation.finished
                    answer = job.generation.output() if ended else None
                    for completion in answer.outputs if ended else ():
                        _ = completion.text  # decoded here: the tokenizer is this thread's
            except Exception as error:  # of this request alone
                self._runner.abort(job.generation)
                ended, answer = True, error
            if ended:
                self._running.remove(job)
                self._loop.call_soon_threadsafe(self._end, job, answer)
