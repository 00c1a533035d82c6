"""Files in the user's cache directory: what is dear to make again but may be lost."""

from __future__ import annotations

import os
from pathlib import Path


def cache_path(kind: str, name: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "quasar-trt" / kind / name


def read_cache(path: Path) -> bytes | None:
    """None where there is nothing that can be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def write_cache(path: Path, content: bytes) -> None:
    """Whole or not at all; not at all where the user's files cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError:
        return
