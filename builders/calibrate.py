"""Calibration: the largest |x| of every input channel of every linear, and the texts of a given file."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from quasar_trt.errors import QuasarError
from quasar_trt.tokenizer import encode

_FIELDS = ("text", "prompt", "turns")
_OUTLIER = 20.0  # a channel this many times the linear's median channel is worth reporting


class ChannelMaxima:
    """Observer of a `ReferenceModel`: linear name -> max|x| per input channel, float32 [in_features].

    Raises QuasarError naming the first linear whose input is not finite.
    """

    def __init__(self):
        self.maxima: dict[str, torch.Tensor] = {}
        self.rows = 0  # rows seen, counted at the first linear

    def __call__(self, name: str, x: torch.Tensor) -> None:
        largest = x.abs().amax(dim=0).float()
        if not largest.isfinite().all():
            raise QuasarError(f"calibration reached NaN or infinity at the input of {name}; the model cannot be built")
        known = self.maxima.get(name)
        self.maxima[name] = largest if known is None else torch.maximum(known, largest)
        if name == next(iter(self.maxima)):
            self.rows += len(x)

    def report(self) -> dict:
        """Channels that were always 0, and for each linear with outliers the ratio of its largest to its median channel."""
        ratios = {name: float(m.max()) / max(float(m.median()), 1e-30) for name, m in self.maxima.items()}
        return {
            "dead_channels": sum(int((m == 0).sum()) for m in self.maxima.values()),
            "outliers": {name: round(ratio, 1) for name, ratio in ratios.items() if ratio >= _OUTLIER},
        }


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
