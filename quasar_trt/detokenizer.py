"""Text of a growing list of token ids, piece by piece: no half characters, nothing said twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character


class Detokenizer:
    """Incremental decoding of one completion. Special tokens (end of sequence and the like) give no text.

    Text is held back while it ends in replacement characters, because coming bytes may complete a character there; the
    last piece contains them as they are. Each token is decoded together with those of the piece before it, since
    tokenizers treat the first token of a text differently (they drop its leading space).

    decode: token ids -> text, without special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._window: list[int] = []  # tokens decoded together: those of the last whole piece, then the pending ones
        self._num_whole = 0  # how many of them the last whole piece had
        self._num_said = 0  # characters of the window's text already returned

    def push(self, token_ids: Sequence[int], final: bool = False) -> str:
        """The text that `token_ids` add; with `final`, also whatever was held back."""
        return "".join([self._push_one(token) for token in token_ids]) + (self._flush() if final else "")

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        piece = whole[self._num_said :]
        if len(whole) == len(text):
            del self._window[: self._num_whole]
            self._num_whole = len(self._window)
            self._num_said = len(self._decode(self._window))
        else:
            self._num_said += len(piece)
        return piece

    def _flush(self) -> str:
        piece = self._decode(self._window)[self._num_said :]
        self._window, self._num_whole, self._num_said = [], 0, 0
        return piece
