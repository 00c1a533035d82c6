"""The manifest: damage is one line that names the file, whatever was put in its place."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from quasar_trt.engines import open_engine
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest


@pytest.fixture
def directory(engine_dirs, tmp_path) -> Path:
    """A copy of the INT8 engine, to be damaged."""
    shutil.copytree(engine_dirs["INT8"], tmp_path / "engine")
    return tmp_path / "engine"


def alter(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("files", []),
        ("files", {}),
        ("files", {"rank0.engine": 5}),
        ("files", {"rank0.engine": {"size": 5}}),
        ("limits", None),
        ("limits", {"max_batch_size": 16, "max_seq_len": "512", "max_draft_len": 16}),
        ("limits", {"max_batch_size": 0, "max_seq_len": 512, "max_draft_len": 16}),
        ("limits", {"max_batch_size": True, "max_seq_len": 512, "max_draft_len": 16}),
        ("limits", {"max_batch_size": 16}),
        ("limits", {"max_batch_size": 16, "max_seq_len": 512, "max_draft_len": 16, "more": 1}),
        ("recipe", "int8"),
        ("recipe", {"quantization": "int9"}),
        ("producer", []),
        ("source", {}),
        ("source", {"path": 5, "kind": "gguf"}),
        ("calibration", "none"),
        ("tp_size", "1"),
        ("more", 1),
    ],
    ids=str,
)
def test_a_damaged_manifest_is_refused_in_one_line(name, value, directory):
    alter(directory, **{name: value})
    with pytest.raises(QuasarError, match="is damaged") as caught:
        Manifest.open(directory)
    assert str(directory / "config.json") in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_value_is_named(directory):
    values = json.loads((directory / "config.json").read_text())
    del values["source"]
    (directory / "config.json").write_text(json.dumps(values))
    with pytest.raises(QuasarError, match="is damaged: source is missing"):
        Manifest.open(directory)


@pytest.mark.parametrize("text", ["", "[]", "{}", "5", "{", "null"])
def test_a_config_that_is_no_manifest_is_refused(text, directory):
    (directory / "config.json").write_text(text)
    with pytest.raises(QuasarError, match=r"not an engine directory: no readable config\.json"):
        Manifest.open(directory)


def test_a_file_in_place_of_the_directory_is_named_as_one(tmp_path):
    (tmp_path / "engine").touch()
    with pytest.raises(QuasarError, match="engine is a file"):
        Manifest.open(tmp_path / "engine")


def test_verify_tells_how_many_bytes_it_has_read(directory):
    manifest = Manifest.open(directory)
    blocks: list[int] = []
    manifest.verify(directory, blocks.append)
    assert sum(blocks) == manifest.size == sum((directory / name).stat().st_size for name in manifest.files)
    for name, record in manifest.files.items():
        assert record.sha256 == hashlib.sha256((directory / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("engine", ["auto", "cpu", "reference"])
def test_fewer_than_one_thread_is_refused_for_every_engine(engine, engine_dirs):
    with pytest.raises(QuasarError, match="threads is 0; allowed: 1 to 1024"):
        open_engine(engine_dirs["INT8"], engine, threads=0)
