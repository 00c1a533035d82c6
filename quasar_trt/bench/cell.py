"""One cell of the benchmark in a process of its own, which idles while the other cells run.

The process works on token ids only, so neither a tokenizer nor torch (for the cpu engine) counts towards its memory.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
import statistics
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from quasar_trt.bench.scratch_sequence import ScratchSequence
from quasar_trt.decode_clock import DecodeClock
from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams


@dataclass(frozen=True)
class Cell:
    """Weights ("BF16" or "INT8"), plain or drafted."""

    weights: str
    drafted: bool

    @property
    def name(self) -> str:
        return f"{self.weights} {'drafted' if self.drafted else 'plain'}"


CELLS = tuple(Cell(weights, drafted) for weights in ("BF16", "INT8") for drafted in (False, True))
BASELINE = CELLS[0]


@dataclass(frozen=True)
class Measurement:
    """One prompt decoded once by one cell.

    decode_tokens, decode_seconds: after the first emitted tokens (see the package's definitions).
    num_verify_steps: passes that emitted tokens, the prompt's last included. num_drafts, num_draft_tokens,
    num_accepted_tokens_per_pos: as in SpeculationMetrics.
    seconds: {"draft", "verify", "accept"} -> time spent there, the prompt's passes counted as verify.
    communication_seconds: of verify, what rank 0 spent in collectives, waiting for other ranks included.
    """

    token_ids: tuple[int, ...]
    decode_tokens: int
    decode_seconds: float
    num_verify_steps: int
    seconds: dict[str, float]
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    communication_seconds: float = 0.0


def measure(runner: Runner, prompt_ids: list[int], sampling_params: SamplingParams) -> Measurement:
    """Decodes one prompt and times it."""
    before, communicated = runner.stats.snapshot(), runner.engine.communication_seconds
    clock = DecodeClock()
    runner.reset_prefix_cache()  # every run computes its prompt
    stream = runner.stream(prompt_ids, sampling_params, detokenize=False)
    token_ids = [token for output in clock.time(stream) for token in output.token_ids]
    used = runner.stats - before
    return Measurement(
        token_ids=tuple(token_ids),
        decode_tokens=clock.tokens,
        decode_seconds=clock.seconds,
        num_verify_steps=used.num_verify_steps,
        seconds={"draft": used.draft_seconds, "verify": used.verify_seconds, "accept": used.accept_seconds},
        num_drafts=used.num_drafts,
        num_draft_tokens=used.num_draft_tokens,
        num_accepted_tokens_per_pos=tuple(used.num_accepted_tokens_per_pos),
        communication_seconds=runner.engine.communication_seconds - communicated,
    )


VERIFY_ROWS = (1, 2, 3, 5, 8)


def verify_costs(engine: Engine, context: int = 128, repeats: int = 15) -> dict[int, float]:
    """Rows of a verify pass over one sequence of `context` cached tokens -> median seconds of interleaved repeats.

    Leaves out numbers of rows that the engine cannot hold, and shortens `context` to fit its max_seq_len.
    """

    numbers = [rows for rows in VERIFY_ROWS if rows < engine.max_seq_len and rows <= engine.max_verify_rows]
    sequence = ScratchSequence(engine, min(context, engine.max_seq_len - max(numbers)))
    seconds: dict[int, list[float]] = {rows: [] for rows in numbers}
    for _ in range(repeats):
        for rows in numbers:
            started = perf_counter()
            sequence.verify(rows)
            seconds[rows].append(perf_counter() - started)
    sequence.close()
    return {rows: statistics.median(times) for rows, times in seconds.items()}


def peak_memory() -> int:
    """Highest resident size of this process in bytes, what is on a GPU not counted.

    VmHWM where there is one: ru_maxrss may carry the parent's size over from the moment the process was started.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _work(connection, engine_dir: Path, runner_options: dict) -> None:
    """The process: opens the engine, answers one Measurement per request, ends with its verify costs and peak memory."""
    try:
        runner = Runner.from_dir(engine_dir, **runner_options)
        connection.send(runner.engine.weight_bytes_per_step)
        while (request := connection.recv()) is not None:
            connection.send(measure(runner, *request))
        connection.send((verify_costs(runner.engine), peak_memory() + runner.engine.device_bytes))
    except QuasarError as error:
        connection.send(error)


class CellHere:
    """A cell in this process, where several ranks run: a process that rank 0 starts would be none of them."""

    def __init__(self, cell: Cell, engine_dir: Path, runner_options: dict):
        self.cell = cell
        self._runner = Runner.from_dir(engine_dir, **runner_options)

    def weight_bytes_per_step(self) -> int:
        return self._runner.engine.weight_bytes_per_step

    def measure(self, prompt_ids: list[int], sampling_params: SamplingParams) -> Measurement:
        return measure(self._runner, prompt_ids, sampling_params)

    def finish(self) -> tuple[dict[int, float], int]:
        """As `CellProcess.finish`; the memory of the process is that of all cells."""
        engine = self._runner.engine
        return verify_costs(engine), peak_memory() + engine.device_bytes

    def __enter__(self) -> CellHere:
        return self

    def __exit__(self, *_) -> None:
        pass


class CellProcess:
    """The parent's side of a cell's process; a context manager that ends it.

    cell: anything with a name.
    """

    def __init__(self, cell, engine_dir: Path, runner_options: dict):
        self.cell = cell
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, engine_dir, runner_options), daemon=True)
        # Ctrl-C reaches every process of the terminal; the parent alone answers it and then ends the cells.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()

    def weight_bytes_per_step(self) -> int:
        """Waits until the engine is open; to be called once, first."""
        return self._receive()

    def measure(self, prompt_ids: list[int], sampling_params: SamplingParams) -> Measurement:
        return self._receive((prompt_ids, sampling_params))

    def finish(self) -> tuple[dict[int, float], int]:
        """Ends the work; returns what `verify_costs` says and the process's peak memory in bytes, that of the engine's GPU
        included."""
        return self._receive(None)

    def _receive(self, *requests):
        """Sends `requests` and waits for the answer. Raises the process's QuasarError, or one that says it has died."""
        try:
            for request in requests:
                self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            raise QuasarError(f"the process of cell {self.cell.name} ended with exit code {code}") from None
        if isinstance(answer, QuasarError):
            raise answer
        return answer

    def __enter__(self) -> CellProcess:
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.join()
        self._connection.close()
