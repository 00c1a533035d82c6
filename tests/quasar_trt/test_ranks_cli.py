"""Commands on several ranks say once what one process says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mpi import errors, run_ranks

from quasar_trt.builders.build import build
from quasar_trt.recipe import Recipe


@pytest.fixture(scope="module")
def two_ranks(hf_dir, tmp_path_factory) -> dict[str, Path]:
    """{"INT8": ..., "BF16": ...} for two ranks."""
    root = tmp_path_factory.mktemp("ranks")
    plain = Recipe(smoothquant=0.5, rotate=False)
    for name, recipe, options in (
        ("INT8", plain, {"calib_size": 2, "calib_max_seq_length": 16}),
        ("BF16", Recipe("none"), {}),
    ):
        build(str(hf_dir), root / name, recipe, tp_size=2, progress=False, **options)
    return {name: root / name for name in ("INT8", "BF16")}


def test_generate_on_two_ranks_prints_what_one_process_prints(engine_dirs, two_ranks):
    options = ["hello there", "--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--drafter", "suffix"]
    one = subprocess.run(
        [sys.executable, "-P", "-m", "quasar_trt.cli", "generate", engine_dirs["BF16"], *options],
        capture_output=True,
        text=True,
        check=False,
    )
    two = run_ranks(2, "-m", "quasar_trt.cli", "generate", two_ranks["BF16"], *options)
    assert one.returncode == two.returncode == 0, two.stderr
    assert two.stdout == one.stdout


def test_a_usage_error_is_said_once(two_ranks):
    done = run_ranks(2, "-m", "quasar_trt.cli", "generate", two_ranks["BF16"], "hello", "--temperatur", "0")
    assert done.returncode == 1 and done.stdout == ""
    (line,) = errors(done.stderr)
    assert "did you mean '--temperature'" in line


def test_bench_on_two_ranks_reports_the_share_of_communication(two_ranks, tmp_path):
    output = tmp_path / "bench.json"
    engines = [part for name, path in two_ranks.items() for part in (f"--{name.lower()}", path)]
    options = ["--random-prompts", "2", "--repeats", "1", "--max-tokens", "8", "--ignore-eos", "--output", output]
    done = run_ranks(2, "-m", "quasar_trt.cli", "bench", *engines, *options)
    assert done.returncode == 0, done.stderr
    assert "ranks," in done.stdout
    cells = json.loads(output.read_text())["cells"]
    for cell in cells.values():
        assert 0 < cell["communication_share_of_verify"] < 1
        assert cell["identical_to_plain"] == [2, 2]
