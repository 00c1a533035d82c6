"""Drafting with an engine of another vocabulary: its text becomes the verifier's ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quasar_trt.drafters.agreement import ANY
from quasar_trt.drafters.base import NO_DRAFT, Draft
from quasar_trt.drafters.engine_block import Block
from quasar_trt.engines.base import Acceptance
from quasar_trt.errors import QuasarError

_WINDOW = 16  # ids of the context that are encoded again with what follows them
_REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of half a character
_MOST_WRITTEN = 4  # ids of its own that the engine may write for each id of the verifier's: some never become text


class ThroughText:
    """From the verifier's ids to those of the drafting engine and back.

    verifier, drafting: their tokenizers, or the directories of them. Raises QuasarError where one is missing.
    """

    def __init__(self, verifier: object, drafting: object):
        from quasar_trt.tokenizer import load_tokenizer

        if verifier is None or drafting is None:
            raise QuasarError(
                "draft_tokenizer is true, but the verifier or the drafting engine has no tokenizer (tokenizer.json)"
            )
        self._verifier, self._drafting = (
            load_tokenizer(Path(each)) if isinstance(each, str | Path) else each for each in (verifier, drafting)
        )

    def ids(self, context: Sequence[int]) -> list[int]:
        """What the drafting engine reads: the text of the verifier's ids, encoded anew."""
        from quasar_trt.tokenizer import decode, encode

        return encode(self._drafting, decode(self._verifier, context, skip_special_tokens=False))

    def continuation(self, context: Sequence[int], read: Sequence[int], written: Sequence[int]) -> list[int]:
        """The verifier's ids of what the drafting engine has written behind the ids that it has read."""
        from quasar_trt.tokenizer import decode

        before = decode(self._drafting, read[-_WINDOW:], skip_special_tokens=False)
        text = decode(self._drafting, [*read[-_WINDOW:], *written], skip_special_tokens=False)
        new = text[len(before) :].rstrip(_REPLACEMENT)
        last = list(context[-_WINDOW:])
        known = decode(self._verifier, last, skip_special_tokens=False)
        ids = self._verifier(known + new, add_special_tokens=False)["input_ids"]
        if ids[: len(last)] != last:  # the text of these ids is not encoded as they are
            return self._verifier(new, add_special_tokens=False)["input_ids"]
        return ids[len(last) :]


@dataclass
class TextBlock(Block):
    """A block that the engine writes in its own ids, each the most probable one; the drafter knows the verifier's only."""

    written: list[int] = field(default_factory=list)

    @property
    def testable(self) -> Draft:
        return NO_DRAFT

    def accept(self, logits: np.ndarray, draft: Draft) -> Acceptance:
        return Acceptance((int(logits[0].argmax()),), 0)

    def _add(self, emitted: Sequence[int]) -> None:
        read = self.text[: len(self.text) - len(self.written)]
        self.written += emitted
        self.text += emitted
        self.ids = self.vocabulary.continuation(self.request.context, read, self.written)[: self.request.limit]
        self.kinds = [ANY] * len(self.ids)
        if len(self.written) >= _MOST_WRITTEN * self.request.limit:
            self.goes_on = False
