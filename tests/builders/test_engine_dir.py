"""An engine directory appears whole or not at all, and replaces only another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from quasar_trt.builders.engine_dir import appearing_whole, check_output
from quasar_trt.errors import QuasarError

MANIFEST = '{"format_version": 1, "recipe": {}}'


def old_engine(tmp_path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank0.engine").write_text("old")
    (out / "config.json").write_text(MANIFEST)
    return out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupt_between_the_renames_puts_the_old_engine_back(tmp_path, monkeypatch, error):
    out = old_engine(tmp_path)
    original = Path.rename

    def rename(path, target):
        if path.name == "new":
            raise error
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((KeyboardInterrupt, QuasarError)), appearing_whole(out, force=True):
        pass
    assert (out / "rank0.engine").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_told_with_the_output_and_leaves_nothing(tmp_path):
    out = tmp_path / "deep" / "out"
    with pytest.raises(QuasarError) as error, appearing_whole(out, force=False), open("/dev/full", "wb") as full:
        full.write(b"weights")
    assert str(error.value).startswith(
        f"cannot write {out}: No space left on device; make room there, or choose another"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_old_engine_that_cannot_be_put_back_is_kept_and_named(tmp_path, monkeypatch):
    out = old_engine(tmp_path)
    original = Path.rename

    def rename(path, target):
        if target == out:
            raise PermissionError(1, "Operation not permitted")
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(QuasarError) as error, appearing_whole(out, force=True):
        pass
    kept = next(tmp_path.glob(".out.*/replaced"))
    assert (kept / "rank0.engine").read_text() == "old"
    assert f"cannot rename {kept} to {out}" in str(error.value)


def test_a_directory_appears_with_its_parents_and_only_at_the_end(tmp_path):
    out = tmp_path / "deep" / "out"
    with appearing_whole(out, force=False) as directory:
        (directory / "rank0.engine").write_text("new")
        assert not out.exists() and directory.parent.parent == out.parent
    assert (out / "rank0.engine").read_text() == "new"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_what_was_there(existing, failure, tmp_path):
    out = old_engine(tmp_path) if existing else tmp_path / "out"
    with pytest.raises(failure), appearing_whole(out, force=existing) as directory:
        (directory / "rank0.engine").write_text("half")
        raise failure
    assert {path.name: (path / "rank0.engine").read_text() for path in tmp_path.iterdir()} == (
        {"out": "old"} if existing else {}
    )


def test_an_output_that_appeared_meanwhile_is_kept(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(QuasarError, match="exists; choose another"), appearing_whole(out, force=False):
        old_engine(tmp_path)
    assert (out / "rank0.engine").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_replaces_an_engine_or_an_empty_directory(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for text in ("first", "second"):
        with appearing_whole(out, force=True) as directory:
            (directory / "rank0.engine").write_text(text)
            (directory / "config.json").write_text(MANIFEST)
        assert (out / "rank0.engine").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("engine", "exists; choose another, or replace it with --force"),
        ("file", "exists and is not a directory"),
        ("link", "exists and is not a directory"),
        ("dangling link", "exists and is not a directory"),
        ("other directory", "is not an engine directory; --force replaces engine directories only"),
        ("directory of engines", "is not an engine directory; --force replaces engine directories only"),
    ],
)
def test_other_outputs_are_refused_in_one_line(kind, message, tmp_path):
    out = tmp_path / "out"
    if kind == "engine":
        old_engine(tmp_path)
    elif kind == "file":
        out.write_text("precious")
    elif "link" in kind:
        out.symlink_to(tmp_path if kind == "link" else tmp_path / "nowhere")
    elif kind == "directory of engines":
        out.mkdir()
        old_engine(out)
    else:
        out.mkdir()
        (out / "precious.txt").write_text("keep")
    with pytest.raises(QuasarError, match=message) as error:
        check_output(out, force=kind != "engine")
    assert "\n" not in str(error.value) and str(out) in str(error.value)


@pytest.mark.parametrize("place", [".", "..", "/"])
def test_the_working_directory_and_what_holds_it_are_never_replaced(place, tmp_path, monkeypatch):
    monkeypatch.chdir(old_engine(tmp_path))
    with pytest.raises(QuasarError, match=r"is the working directory or holds it; choose another"):
        check_output(Path(place), force=True)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "out"
    with pytest.raises(QuasarError, match="choose another output") as error, appearing_whole(place, force=False):
        pytest.fail("entered")
    assert str(error.value).startswith(f"cannot write in {place.parent}: ") and "\n" not in str(error.value)


def test_a_failure_leaves_no_parents_that_were_made_for_it(tmp_path):
    (tmp_path / "old").mkdir()
    with pytest.raises(KeyboardInterrupt), appearing_whole(tmp_path / "old" / "a" / "b" / "out", force=False):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
