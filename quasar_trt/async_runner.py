"""`Runner` for servers: coroutines ask, one thread owns the runner and advances everything that was asked together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread

from quasar_trt.errors import QuasarError, RequestFailed, RunnerBusy
from quasar_trt.generation import Generation
from quasar_trt.metrics import SpeculationMetrics
from quasar_trt.outputs import RequestOutput, StreamOutput
from quasar_trt.prompts import Prompt
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.service_metrics import Load, ServiceMetrics

_Answer = StreamOutput | RequestOutput | BaseException | None


class _Job:
    """One prompt. The event loop has the request id and the inbox of answers, the engine thread has the generation.

    size: how many completions are asked for. prepare: checks the prompt, in the engine thread.
    """

    def __init__(self, request_id: str, size: int, streams: bool, prepare: Callable[[], Generation]):
        self.request_id = request_id
        self.size = size
        self.streams = streams
        self.prepare = prepare
        self.generation: Generation | None = None
        self.answers: asyncio.Queue[_Answer] = asyncio.Queue()

    async def answer(self) -> StreamOutput | RequestOutput | None:
        """The next one; None after the last piece. Raises what went wrong."""
        answer = await self.answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class AsyncRunner:
    """Generation for many callers at once, to be made within a running event loop and used from that loop alone.

    runner: nobody else may use it until `shutdown` is over.
    max_requests: completions that are computed or wait at a time; a further prompt is refused with RunnerBusy.

    failure: what ended the engine thread; None while it lives. failed: set when it has ended so.

    As a context manager it is shut down at the end: all that was asked is answered first, unless an exception leaves it.
    """

    def __init__(self, runner: Runner, *, max_requests: int = 256):
        if max_requests < 1:
            raise QuasarError(f"max_requests is {max_requests}; allowed: 1 or more")
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._max_requests = max_requests
        self._open: dict[str, _Job] = {}  # whose last answer has not come
        self._num_open = 0  # their completions
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._questions: set[asyncio.Future] = set()  # that `_ask` waits for
        self._num_asked = 0
        self._closed = False
        self.failure: QuasarError | None = None
        self.failed = asyncio.Event()
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
        drafts: bool = True,
    ) -> RequestOutput:
        """Completes one prompt. Cancelling the task aborts the request.

        request_id: a name of the caller's own for `abort`.
        timeout: seconds after which it ends with finish_reason "timeout" and what there is of it.
        drafts: as in `Runner.prepare`.

        Raises QuasarError as `Runner.generate` does and after `shutdown`, RunnerBusy, and whatever the engine raised.
        """
        prepare = partial(self._runner.prepare, prompt, sampling_params, timeout=timeout, drafts=drafts)
        async with self._job(request_id, sampling_params, prepare, streams=False) as job:
            return await job.answer()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        drafts: bool = True,
    ) -> AsyncIterator[StreamOutput]:
        """Completes one prompt, piece by piece. Closing the iterator (`contextlib.aclosing`) aborts the request.

        Parameters and errors as in `generate`; RequestFailed where a completion cannot go on. A slow reader holds up nobody:
        what it has not read waits for it.
        """
        prepare = partial(self._runner.prepare, prompt, sampling_params, timeout=timeout, drafts=drafts)
        async with self._job(request_id, sampling_params, prepare, streams=True) as job:
            while (piece := await job.answer()) is not None:
                yield piece

    def check_room(self, num_completions: int) -> None:
        """Raises RunnerBusy where a prompt with so many completions would be refused now."""
        if self._num_open + num_completions > self._max_requests:
            raise RunnerBusy(f"{self._num_open} requests are open; allowed: {self._max_requests}; ask again later")

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
    async def _job(self, request_id: str | None, params: SamplingParams | None, prepare, streams: bool):
        if request_id is None:
            request_id = f"request {self._num_asked}"
        if request_id in self._open:
            raise QuasarError(f"request_id is '{request_id}', which has not ended; give each request its own")
        self._check_open()
        size = getattr(self._runner.default_sampling_params if params is None else params, "n", 1)
        if size > self._max_requests:
            raise QuasarError(f"n is {size}; allowed: at most {self._max_requests}, the completions at a time")
        self.check_room(size)
        self._num_asked += 1
        job = self._open[request_id] = _Job(request_id, size, streams, prepare)
        self._num_open += size
        self._none_open.clear()
        self._commands.put(partial(self._begin, job))
        try:
            yield job
        finally:
            if self._open.get(request_id) is job:
                await self.abort(request_id)

    def _check_open(self) -> None:
        if self.failure:
            raise self.failure
        if self._closed:
            raise QuasarError("the runner is shut down; make another")

    async def _ask(self, question: Callable[[], object]):
        self._check_open()
        answered = self._loop.create_future()

        def command() -> None:
            try:
                answer, settle = question(), answered.set_result
            except Exception as error:
                answer, settle = error, answered.set_exception
            self._loop.call_soon_threadsafe(lambda: answered.done() or settle(answer))

        self._questions.add(answered)
        self._commands.put(command)
        try:
            return await answered
        finally:
            self._questions.discard(answered)

    def _deliver(self, news: list[tuple[_Job, list[_Answer], bool]]) -> None:
        """Answers of one pass; whether they are the last ones of their job."""
        for job, answers, ended in news:
            for answer in answers:
                job.answers.put_nowait(answer)
            if ended:
                del self._open[job.request_id]
                self._num_open -= job.size
        if not self._open:
            self._none_open.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = RequestFailed(f"the engine thread has ended: {error!r}; make another runner")
        self.failure.__cause__ = error
        self._deliver([(job, [self.failure], True) for job in list(self._open.values())])
        for answered in self._questions:
            if not answered.done():
                answered.set_exception(self.failure)
        self.failed.set()

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
            job.generation = job.prepare()
        except Exception as error:
            self._send([(job, [error], True)])
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
            self._send([(job, [error], True) for job in self._running])
            self._running.clear()
        self._tell()

    def _tell(self) -> None:
        news = [(job, *self._news(job)) for job in self._running]
        self._running = [job for job, _, ended in news if not ended]
        if news := [each for each in news if each[1]]:
            self._send(news)

    def _news(self, job: _Job) -> tuple[list[_Answer], bool]:
        """What the last pass gave for one job, and whether that is all."""
        answers: list[_Answer] = []
        generation = job.generation
        try:
            if job.streams:
                answers.extend(generation.pieces())
                return [*answers, None] if generation.is_told else answers, generation.is_told
            if not generation.finished:
                return [], False
            output = generation.output()
            for completion in output.outputs:
                _ = completion.text  # decoded here: the tokenizer is this thread's
            return [output], True
        except Exception as error:  # of this request alone
            self._runner.abort(generation)
            return [*answers, error], True

    def _send(self, news: list[tuple[_Job, list[_Answer], bool]]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, news)
