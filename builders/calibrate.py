"""Calibration: what the inputs of the linears are like, and the texts of a given file."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from quasar_trt.errors import QuasarError
from quasar_trt.tokenizer import encode

_FIELDS = ("text", "prompt", "turns")
_OUTLIER = 20.0  # a channel this many times the linear's median channel is worth reporting


class InputSizes:
    """Counts dead and outlying input channels of each linear whose input it is shown.

    Raises QuasarError naming a linear whose input is not finite.
    """

    def __init__(self):
        self._dead_channels = 0
        self._outliers: dict[str, float] = {}

    def __call__(self, name: str, x: torch.Tensor) -> None:
        """x [rows, in_features] is all that calibration shows to the linear `name`."""
        largest = x.abs().amax(dim=0)
        if not largest.isfinite().all():
            raise QuasarError(f"calibration reached NaN or infinity at the input of {name}; the model cannot be built")
        self._dead_channels += int((largest == 0).sum())
        ratio = float(largest.max()) / max(float(largest.median()), 1e-30)
        if ratio >= _OUTLIER:
            self._outliers[name] = round(ratio, 1)

    def report(self) -> dict:
        """Channels that were always 0, and for each linear with outliers the ratio of its largest to its median channel."""
        return {"dead_channels": self._dead_channels, "outliers": self._outliers}


def read_dataset(path: Path) -> list[str]:
    """The texts of a .txt file (one a line) or a .jsonl file (fields "text", "prompt" or "turns"), blank ones left out.

    Raises QuasarError for an unreadable file, a malformed line, or when nothing usable is left.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise QuasarError(f"calibration file {path} must be .txt (a text per line) or .jsonl ({', '.join(_FIELDS)})")
    try:
        # "utf-8-sig" drops a byte order mark; splitlines() would also cut inside a text, at U+2028 for one.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise QuasarError(f"cannot read calibration file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise QuasarError(f"calibration file {path} is not UTF-8: {error}") from None
    texts = lines if path.suffix == ".txt" else [_row_text(path, i, line) for i, line in enumerate(lines, 1)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        wanted = "non-empty lines" if path.suffix == ".txt" else f"a non-empty field {', '.join(_FIELDS)}"
        raise QuasarError(f"calibration file {path} has no usable text; it needs {wanted}")
    return texts


def _row_text(path: Path, number: int, line: str) -> str:
    if not line.strip():
        return ""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise QuasarError(f"line {number} of calibration file {path} is not JSON: {error}") from None
    value = next((row[field] for field in _FIELDS if row.get(field)), "") if isinstance(row, dict) else ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def dataset_ids(path: Path, tokenizer, count: int, length: int) -> list[list[int]]:
    """The first `count` texts of the file as token ids, each cut to `length`; fewer when the file has fewer.

    Raises as `read_dataset`, and when all of these texts encode to nothing.
    """
    samples = [encode(tokenizer, text)[:length] for text in read_dataset(path)[:count]]
    samples = [ids for ids in samples if ids]
    if not samples:
        raise QuasarError(
            f"the texts of calibration file {path} encode to no tokens; give text in the model's alphabet"
        )
    return samples
