"""Files that hold one JSON object."""

from __future__ import annotations

import json
from pathlib import Path

from quasar_trt.errors import QuasarError


def read_json(path: Path, remedy: str = "") -> dict:
    """The file's object. Raises QuasarError naming the file when it cannot be read or is no JSON object.

    remedy: what a file that cannot be read should have been.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QuasarError(f"cannot read {path}: {error.strerror}{remedy and f'; {remedy}'}") from None
    except ValueError as error:
        raise QuasarError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise QuasarError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return values
