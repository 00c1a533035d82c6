"""A conversation in the terminal: the answer as it comes, and under it how drafting goes."""

from __future__ import annotations

import contextlib
import sys

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from quasar_trt.decode_clock import DecodeClock
from quasar_trt.errors import QuasarError
from quasar_trt.metrics import stats_line
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

RESET = "/reset"
EXIT = "/exit"


class AnswerView:
    """A text that grows above one line of figures. Where there is no terminal, the text alone.

    Whole lines are printed for good; only the last one and the figures are drawn again.
    """

    def __init__(self, console: Console):
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._line = ""

    def __enter__(self) -> AnswerView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._live:
            self._live.stop()
        else:
            self._console.file.write("\n")

    def add(self, text: str, figures: str) -> None:
        if not self._live:
            self._console.file.write(text)
            self._console.file.flush()
            return
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._console.print(Text(line))
        self._live.update(Group(Text(self._line), Text(figures, style="dim")), refresh=True)


class Chat:
    """Messages so far and who answers them.

    system: the first message, kept by `reset`; None for the chat template's own.
    """

    def __init__(self, runner: Runner, sampling_params: SamplingParams, system: str | None, console: Console):
        self.messages: list[dict[str, str]] = []
        self._runner = runner
        self._params = sampling_params
        self._system = system
        self._console = console
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, text: str) -> None:
        """Shows and remembers the answer; Ctrl-C ends the answer, and what came of it is remembered.

        Raises QuasarError, and forgets `text`, when it cannot be answered.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            stream = self._runner.stream(self._runner.chat_ids(self.messages), self._params)
        except QuasarError:
            self.messages.pop()
            raise
        before, clock = self._runner.stats.snapshot(), DecodeClock()
        pieces: list[str] = []
        with contextlib.closing(stream), AnswerView(self._console) as view, contextlib.suppress(KeyboardInterrupt):
            for piece in clock.time(stream):
                pieces.append(piece.text)
                view.add(piece.text, stats_line(self._runner.stats - before, clock.tokens_per_second))
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def converse(chat: Chat, console: Console) -> None:
    """Reads lines until the end of the input or /exit.

    Raises QuasarError for a message that cannot be answered where nobody is there to send another one.
    """
    with contextlib.suppress(ImportError):  # editing and history of the input line, where the platform has it
        import readline  # noqa: F401
    interactive = sys.stdin.isatty()
    if interactive:
        console.print(
            f"{RESET} begins anew, {EXIT} or Ctrl-D leaves, Ctrl-C stops an answer", style="dim", highlight=False
        )
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise QuasarError(f"standard input is not {error.encoding} text; give messages in that encoding") from None
        except KeyboardInterrupt:
            console.print()
            continue
        if line == EXIT:
            return
        if line == RESET:
            chat.reset()
        elif line.startswith("/"):
            console.print(f"unknown command '{line}'; one of: {RESET}, {EXIT}", markup=False, highlight=False)
        elif line:
            try:
                chat.answer(line)
            except QuasarError as error:
                if not interactive:
                    raise
                console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
