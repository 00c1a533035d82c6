"""config.json of an engine directory: what was built, from what, how, and the hashes of its weight files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quasar_trt.errors import QuasarError
from quasar_trt.plan import Plan, plan_header
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import FileRecord, hash_file, read_header

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Limits:
    """Bounds fixed at build time: requests per pass, tokens per sequence, draft tokens per request and pass."""

    max_batch_size: int
    max_seq_len: int
    max_draft_len: int


@dataclass(frozen=True)
class Manifest:
    """The engine directory's own description.

    producer: package name -> version, of what built it.
    target: "cpu", one of `PLAN_TARGETS` or `LLM_TARGET`; source: {"path": ..., "kind": ..., "notices": [...]}.
    calibration: {"source", "samples", "tokens", "seed"} or None for unquantized engines.
    files: path below the directory -> FileRecord, for every weight file.
    plan: how the TensorRT plans among them were compiled, None where there are none.
    """

    producer: dict[str, str]
    target: str
    limits: Limits
    tp_size: int
    recipe: Recipe
    source: dict
    calibration: dict | None
    files: dict[str, FileRecord]
    plan: Plan | None = None
    format_version: int = FORMAT_VERSION

    def write(self, directory: Path) -> None:
        values = dataclasses.asdict(self) | {"recipe": self.recipe.to_dict()}
        (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def open(cls, directory: Path) -> Manifest:
        """Reads the manifest and checks size and header hash of every weight file.

        Raises QuasarError for a directory that is no engine, another format version, or a file that is missing, truncated
        or has another header.
        """
        directory = Path(directory)
        path = directory / "config.json"
        if directory.is_file():
            raise QuasarError(f"{directory} is a file; an engine directory is needed, as quasar-trt build makes it")
        if not directory.is_dir():
            raise QuasarError(
                f"engine directory {directory} does not exist; make one with: quasar-trt build MODEL --output-dir DIR"
            )
        try:
            values = json.loads(path.read_text())
            version = values["format_version"]
        except (OSError, ValueError, KeyError, TypeError):
            raise QuasarError(
                f"{directory} is not an engine directory: no readable config.json with a format_version; if it is a model, build "
                f"it: quasar-trt build {directory} --output-dir DIR"
            ) from None
        if version != FORMAT_VERSION:
            raise QuasarError(
                f"{directory} has format version {version}; this version reads {FORMAT_VERSION}; build the engine again"
            )
        try:
            _check_values(values)
            manifest = cls(
                **values
                | {
                    "limits": Limits(**values["limits"]),
                    "recipe": Recipe.from_dict(values["recipe"]),
                    "files": {name: FileRecord(**record) for name, record in values["files"].items()},
                    "plan": values["plan"] and Plan(**values["plan"]),
                }
            )
        except KeyError as error:
            raise QuasarError(f"{path} is damaged: {error.args[0]} is missing; build the engine again") from None
        except (TypeError, QuasarError) as error:
            raise QuasarError(f"{path} is damaged: {error}; build the engine again") from None
        for name, record in manifest.files.items():
            file = directory / name
            if not file.is_file():
                raise QuasarError(f"{file} is missing; build the engine again")
            if file.stat().st_size != record.size:
                raise QuasarError(
                    f"{file} has {file.stat().st_size} bytes, the manifest says {record.size}; it is truncated or altered: build the engine again"
                )
            is_plan = manifest.plan is not None and file.suffix == ".engine"
            header = plan_header(file) if is_plan else read_header(file)[3]
            if hashlib.sha256(header).hexdigest() != record.header_sha256:
                raise QuasarError(
                    f"{file} has another header than the manifest says; it was altered: build the engine again"
                )
        return manifest

    @property
    def size(self) -> int:
        """Bytes of all weight files."""
        return sum(record.size for record in self.files.values())

    def verify(self, directory: Path, advance: Callable[[int], None] = lambda size: None) -> None:
        """Hashes every weight file, telling `advance` the bytes read. Raises QuasarError naming the first that differs."""
        for name, record in self.files.items():
            found = hash_file(directory / name, advance)
            if found != record.sha256:
                raise QuasarError(
                    f"{directory / name} has sha256 {found}, the manifest says {record.sha256}; it was altered: build the engine again"
                )


_TYPES = {
    "producer": dict,
    "target": str,
    "limits": dict,
    "tp_size": int,
    "recipe": dict,
    "source": dict,
    "calibration": dict | None,
    "files": dict,
    "plan": dict | None,
}


def _check_values(values: dict) -> None:
    """Raises KeyError or TypeError for JSON that cannot be a manifest's values."""
    for name, kind in _TYPES.items():
        if not isinstance(values[name], kind):
            raise TypeError(f"{name} is {values[name]!r}")
    for name, value in (values["limits"] | {"tp_size": values["tp_size"]}).items():
        if type(value) is not int or value < 1:
            raise TypeError(f"{name} is {value!r}, not an integer of at least 1")
    for name in ("path", "kind"):
        if not isinstance(values["source"][name], str):
            raise TypeError(f"the source's {name} is {values['source'][name]!r}")
    if not values["files"]:
        raise TypeError("it names no weight file")
    for name, record in values["files"].items():
        if not isinstance(record, dict):
            raise TypeError(f"files: {name} is {record!r}")
    ranks = Counter(re.sub(r"rank\d+", "rank*", name) for name in values["files"])
    for name, count in ranks.items():
        if count != values["tp_size"]:
            raise TypeError(f"files: {count} of {name}, tp_size is {values['tp_size']}")
