"""An engine directory appears whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quasar_trt.errors import QuasarError


def check_output(output_dir: Path, force: bool) -> None:
    """Refuses, before any work is done, an existing output (`--force` replaces engine directories only) and a place that cannot
    be written to."""
    here = Path.cwd()
    if output_dir.resolve() in (here, *here.parents):
        raise QuasarError(f"output {output_dir} is the working directory or holds it; choose another")
    parent = next(parent for parent in output_dir.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise QuasarError(f"cannot write in {parent}; choose another output")
    if not output_dir.exists() and not output_dir.is_symlink():
        return
    if output_dir.is_symlink() or not output_dir.is_dir():
        raise QuasarError(f"output {output_dir} exists and is not a directory; choose another")
    if not force:
        raise QuasarError(f"output directory {output_dir} exists; choose another, or replace it with --force")
    if any(output_dir.iterdir()) and not _is_engine_dir(output_dir):
        raise QuasarError(
            f"{output_dir} is not an engine directory; --force replaces engine directories only: choose another"
        )


def _is_engine_dir(directory: Path) -> bool:
    """Whether it has a manifest: what only holds an engine directory holds other things too."""
    try:
        values = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and {"format_version", "recipe"} <= set(values)


@contextmanager
def appearing_whole(output_dir: Path, force: bool) -> Iterator[Path]:
    """A directory in a temporary one beside `output_dir`: it takes that name when the block succeeds, and vanishes with the
    temporary one when it fails, as do parents that were made for it.

    Raises QuasarError for a disk that gets full in the block.
    """
    absent = [parent for parent in output_dir.parents if not parent.exists()]
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.", dir=output_dir.parent))
    except OSError as error:
        raise QuasarError(f"cannot write in {output_dir.parent}: {error.strerror}; choose another output") from None
    replaced = temporary / "replaced"
    new = temporary / "new"
    try:
        new.mkdir()
        yield new
        check_output(output_dir, force)  # it may have appeared meanwhile
        if output_dir.exists():
            _rename(output_dir, replaced)
        _rename(new, output_dir)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise QuasarError(
            f"cannot write {output_dir}: {error.strerror}; make room there, or choose another output (--dry-run tells how much it takes)"
        ) from None
    finally:
        if replaced.exists() and new.exists():  # failed or interrupted between the two
            _rename(replaced, output_dir)  # if this fails too, `replaced` stays
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # what holds something stays
            for parent in absent:
                parent.rmdir()


def _rename(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        raise QuasarError(f"cannot rename {source} to {target}: {error.strerror}") from None
