"""The windows of token ids that fidelity is measured on: a given text, the package's own, or random ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quasar_trt.errors import QuasarError
from quasar_trt.model_config import whole_number
from quasar_trt.tokenizer import check_ids, encode

OWN_TEXT = Path(__file__).parent / "data" / "fidelity.txt"
_WINDOW = 512
_SEED, _RANDOM_TOKENS = 0, 2048


def fidelity_windows(
    tokenizer,
    vocab_size: int,
    max_seq_len: int,
    *,
    text: Path | None = None,
    tokens: int | None = None,
    window: int | None = None,
) -> tuple[list[list[int]], str]:
    """(windows of at least 2 ids, what they are taken from).

    tokenizer: None gives random ids. text: a UTF-8 file; the package's own when None. tokens: how many of the text's first
    ids are used; all when None. window: ids per window, the last one may have fewer; 512, or the engine's max_seq_len where
    that is less, when None.

    Raises QuasarError for a text that cannot be read, has fewer ids than `tokens` or ids outside of the vocabulary, and for
    a window that the engine does not allow.
    """
    if window is not None and not 2 <= window <= max_seq_len:
        raise QuasarError(f"window is {window}; this engine allows 2 to {max_seq_len} tokens")
    if tokens is not None:
        whole_number("tokens", tokens, least=2)
    if tokenizer is not None:
        ids = encode(tokenizer, _read(text or OWN_TEXT))
        described = "the package's own text" if text is None else str(text)
        if len(ids) < (tokens or 2):
            raise QuasarError(
                f"{described} has {len(ids)} tokens; at least {tokens or 2} are needed: give a longer text"
            )
        check_ids(ids, vocab_size, described)
    elif text is not None:
        raise QuasarError(
            f"text {text} needs a tokenizer, and this engine has none; leave it out to measure on random ids"
        )
    else:
        ids = np.random.default_rng(_SEED).integers(vocab_size, size=tokens or _RANDOM_TOKENS).tolist()
        described = f"random token ids (seed {_SEED}; the engine has no tokenizer)"
    ids = ids[:tokens]
    size = window or min(_WINDOW, max_seq_len)
    windows = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [ids for ids in windows if len(ids) >= 2], described


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # drops a byte order mark
    except OSError as error:
        raise QuasarError(f"cannot read text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise QuasarError(f"text {path} is not UTF-8: {error}; give it in that encoding") from None
