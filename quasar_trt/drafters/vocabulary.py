"""Whether two engines mean the same by their token ids, and the step from one to the other where they do."""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quasar_trt.errors import QuasarError

_STAND_IN = 0  # id, for those that the drafting engine does not have


class SameVocabulary:
    """Ids mean the same in both engines, as far as both have them; one may have more, padded or added ones.

    verifier, drafting: the sizes of their vocabularies.
    """

    def __init__(self, verifier: int, drafting: int):
        self._verifier = verifier
        self._drafting = drafting

    def ids(self, context: Sequence[int]) -> list[int]:
        """What the drafting engine reads; another id stands in for those that it does not have."""
        if self._drafting >= self._verifier:
            return list(context)
        return [token if token < self._drafting else _STAND_IN for token in context]

    def row(self, logits: np.ndarray) -> np.ndarray:
        """The drafting engine's row [its vocabulary] float32 as one of the verifier's; ids that it lacks are impossible."""
        if len(logits) >= self._verifier:
            return logits[: self._verifier]
        return np.concatenate([logits, np.full(self._verifier - len(logits), -np.inf, np.float32)])


def check_same_vocabulary(verifier: object, drafting: Path | None, sizes: tuple[int, int]) -> None:
    """Raises QuasarError unless each id that both engines have is the same token in both.

    verifier, drafting: a tokenizer, the directory of one, or None; sizes: of the two vocabularies, which must be equal
    where a tokenizer is missing, because nothing else can be compared.
    """
    if isinstance(verifier, str | Path) and drafting is not None and _same_file(Path(verifier), drafting):
        return
    if verifier is None or drafting is None or not (drafting / "tokenizer.json").is_file():
        if sizes[0] != sizes[1]:
            raise QuasarError(
                f"the verifier has {sizes[0]} token ids, the drafting engine {sizes[1]}, and whether they mean the same cannot "
                "be told without both tokenizers (tokenizer.json); build both engines from models that have one"
            )
        return
    ours, theirs = _tokens(verifier), _tokens(drafting)
    for token_id in sorted(ours.keys() & theirs.keys()):
        if ours[token_id] != theirs[token_id]:
            raise QuasarError(
                f"token id {token_id} is {ours[token_id]!r} in the verifier's vocabulary and {theirs[token_id]!r} in that of "
                f"{drafting}; draft with an engine of the same vocabulary, or through text: --drafter-option draft_tokenizer=true"
            )


def _same_file(one: Path, other: Path) -> bool:
    paths = one / "tokenizer.json", other / "tokenizer.json"
    return all(path.is_file() for path in paths) and filecmp.cmp(*paths, shallow=False)


def _tokens(tokenizer: object) -> dict[int, str]:
    """Id -> token, added ones included."""
    if isinstance(tokenizer, str | Path):
        from quasar_trt.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(Path(tokenizer))
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
