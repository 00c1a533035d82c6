"""Text of a growing list of token ids, piece by piece: no half characters, nothing said twice, nothing behind a stop text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
_MOST_PENDING = 64  # tokens; bytes that are no character after so many will never be one


class Detokenizer:
    """Incremental decoding of one completion.

    Text is held back while it ends in replacement characters, because coming bytes may complete a character there; after
    `_MOST_PENDING` tokens, and in the end, they are said as they are. Each token is decoded together with those of the piece before it, since tokenizers
    treat the first token of a text differently (they drop its leading space).

    decode: token ids -> text.
    stop: texts that end the completion; what may be the beginning of one is not said before that is decided.
    include_stop: whether the stop text belongs to the text.
    text: everything decoded so far, and after the end exactly the completion's text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), include_stop: bool = False):
        self.text = ""
        self._decode = decode
        self._stop = stop
        self._include_stop = include_stop
        self._window: list[int] = []  # tokens decoded together: those of the last whole piece, then the pending ones
        self._num_whole = 0  # how many of them the last whole piece had
        self._num_decoded = 0  # characters of the window's text already in `text`
        self._num_said = 0  # characters of `text` already returned by `say`
        self._ended = False

    def copy(self) -> Detokenizer:
        """One that goes on by itself from here."""
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def push(self, token: int) -> int:
        """Takes one token; returns how many characters the text gained."""
        self._window.append(token)
        decoded = self._decode(self._window)
        whole = decoded.rstrip(_REPLACEMENT)
        complete = len(whole) == len(decoded) or len(self._window) - self._num_whole >= _MOST_PENDING
        piece = (decoded if complete else whole)[self._num_decoded :]
        if complete:
            del self._window[: self._num_whole]
            self._num_whole = len(self._window)
            self._num_decoded = len(self._decode(self._window))
        else:
            self._num_decoded += len(piece)
        self.text += piece
        return len(piece)

    def find_stop(self, num_new: int) -> str | None:
        """The stop text that the last `num_new` characters complete first, of several the first in the list.

        The text then ends there and no further token may be pushed.
        """
        found = None
        for stop in self._stop if num_new else ():
            begin = self.text.find(stop, max(len(self.text) - num_new - len(stop) + 1, 0))
            if begin >= 0 and (found is None or begin + len(stop) < found[0]):
                found = begin + len(stop), stop
        if found is None:
            return None
        end, stop = found
        self.text = self.text[: end if self._include_stop else end - len(stop)]
        self._ended = True
        return stop

    def end(self) -> None:
        """No further token comes: what was held back belongs to the text, unless a stop text has ended it."""
        if not self._ended:
            self.text += self._decode(self._window)[self._num_decoded :]
            self._ended = True

    def say(self) -> str:
        """What can be said now and was not yet; after the end, all of the rest."""
        end = len(self.text) if self._ended else len(self.text) - self._num_open()
        piece = self.text[self._num_said : end]
        self._num_said = max(self._num_said, end)
        return piece

    def _num_open(self) -> int:
        """Length of the longest end of the text that begins a stop text."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        first = {stop[0] for stop in self._stop}
        for length in range(min(longest, len(self.text)), 0, -1):
            if self.text[-length] in first and any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0
