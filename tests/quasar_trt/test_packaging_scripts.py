"""The shell scripts, run in a copy with stand-ins for python and quasar-trt: what they call, and where they put things."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.py", "pyproject.toml", "constraints.txt")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout whose virtual environment only writes its commands, one a line, to `calls`."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for folder in ("plugins/csrc", "quasar_trt/engines/csrc", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in SOURCES:
        (tmp_path / name).touch()
    for name in ("python", "quasar-trt"):
        command = tmp_path / ".venv" / "bin" / name
        failing = '[ "$1" != info ]' if name == "quasar-trt" else "true"
        command.write_text(f'#!/bin/sh\necho "{name} $*" >>calls\n{failing}\n')
        command.chmod(0o755)
    (tmp_path / ".venv" / "bin" / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    return tmp_path


def run(checkout: Path, *command: str) -> list[str]:
    """The calls that the command makes."""
    (checkout / "calls").unlink(missing_ok=True)
    subprocess.run(command, cwd=checkout, capture_output=True, check=True)
    return (checkout / "calls").read_text().splitlines() if (checkout / "calls").exists() else []


def install(checkout: Path, extra: str) -> list[str]:
    return run(checkout, "bash", "-euc", f". scripts/venv.sh; install_into_venv {extra}")


def make_newer(checkout: Path, name: str) -> None:
    newest = max(path.stat().st_mtime for path in (checkout / ".venv").glob("quasar-trt-*"))
    os.utime(checkout / name, (newest + 10, newest + 10))


@pytest.mark.parametrize("name", SOURCES)
def test_an_installation_is_repeated_only_when_packaging_changes(name, checkout):
    assert len(install(checkout, "test")) == 1
    assert install(checkout, "test") == []
    make_newer(checkout, name)
    assert len(install(checkout, "test")) == 1


def test_the_test_extra_serves_the_demo_too_but_not_the_other_way_round(checkout):
    assert len(install(checkout, "test")) == 1
    assert install(checkout, "gguf") == []
    (checkout / ".venv" / "quasar-trt-test").unlink()
    assert len(install(checkout, "gguf")) == 1
    assert len(install(checkout, "test")) == 1


def demo_directories(checkout: Path, model: str) -> set[str]:
    calls = run(checkout, "scripts/demo.sh", "--model", model, "--short")
    return {call.split("--output-dir ")[1].split()[0] for call in calls if call.startswith("quasar-trt build")}


def test_the_demo_keeps_models_of_the_same_name_apart(checkout):
    one, other = (demo_directories(checkout, model) for model in ("one/model.gguf", "other/model.gguf"))
    assert len(one) == len(other) == 2  # INT8 and BF16
    assert not one & other
    assert one == demo_directories(checkout, "one/model.gguf")


def test_the_demo_takes_a_prompt_that_begins_with_a_hyphen(checkout):
    calls = run(checkout, "scripts/demo.sh", "--model", "m.gguf", "--prompt", "-1 + 2", "--short")
    assert [
        call
        for call in calls
        if call.startswith("quasar-trt generate") and call.endswith("/int8 -1 + 2") and " -- " in call
    ]


def test_the_gpu_check_reads_and_saves_where_the_caller_stands(checkout):
    (checkout / "elsewhere").mkdir()
    (checkout / "elsewhere" / "m.gguf").touch()
    check = "python -m quasar_trt.bench.gpu_check"
    for model, given in (("m.gguf", f"{checkout}/elsewhere/m.gguf"), ("owner/name", "owner/name")):
        calls = run(checkout, "bash", "-c", f"cd elsewhere; ../scripts/gpu_check.sh figures.json {model}")
        assert calls[-1] == f"{check} {checkout}/elsewhere/figures.json {given} examples/prompts.jsonl"
