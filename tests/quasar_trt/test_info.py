"""What `quasar-trt info` shows of an engine directory, and which features it names."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil

import pytest
from rich.console import Console

from quasar_trt import machine
from quasar_trt.errors import QuasarError
from quasar_trt.info import show_engine, verify_engine
from quasar_trt.manifest import Manifest
from quasar_trt.recipe import Recipe


@pytest.mark.parametrize("text", ["[]", "5", "null", '"text"', "{"])
def test_a_damaged_fidelity_file_is_one_line(text, engine_dirs, tmp_path):
    directory = tmp_path / "engine"
    shutil.copytree(engine_dirs["INT8"], directory)
    (directory / "fidelity.json").write_text(text)
    with pytest.raises(QuasarError, match=r"fidelity\.json is damaged: not ") as caught:
        show_engine(directory, Manifest.open(directory), Console(file=io.StringIO()))
    assert "\n" not in str(caught.value)


def test_a_damaged_group_is_one_line(engine_dirs, tmp_path):
    directory = tmp_path / "engine"
    shutil.copytree(engine_dirs["INT8"], directory)
    (directory / "fidelity.json").write_text('{"groups": {"a": {"alpha": 0.5}}}')
    with pytest.raises(QuasarError, match="damaged: a group without its alpha, statistic or error"):
        show_engine(directory, Manifest.open(directory), Console(file=io.StringIO()))


def test_the_five_worst_groups_are_shown(engine_dirs, tmp_path):
    directory = tmp_path / "engine"
    shutil.copytree(engine_dirs["INT8"], directory)
    groups = {
        f"transformer.layers.{i}.mlp.proj": {"alpha": 0.6, "statistic": "3rms", "error": i / 100} for i in range(7)
    }
    (directory / "fidelity.json").write_text(json.dumps({"groups": groups}))
    out = io.StringIO()
    show_engine(directory, Manifest.open(directory), Console(file=out, width=120))
    shown = out.getvalue().split("largest relative errors")[1]
    positions = [shown.index(f"layers.{i}.mlp.proj") for i in (6, 5, 4, 3, 2)]
    assert positions == sorted(positions)
    assert "0.0600 (alpha 0.6, statistic 3rms)" in shown
    assert "layers.1." not in shown


def shown_of(directory, recipe: Recipe) -> str:
    """What is shown of an engine, in one line, if it had been built to this recipe."""
    out = io.StringIO()
    manifest = dataclasses.replace(Manifest.open(directory), recipe=recipe)
    show_engine(directory, manifest, Console(file=out, width=100))
    return " ".join(out.getvalue().split())


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (
            Recipe(lm_head="bf16"),
            "INT8 weights per output channel, rounding gptq, 8-bit activations per token, smoothing searched, rotated, "
            "BF16 head calibration",
        ),
        (
            Recipe(smoothquant=0.6, activations=16, lm_head="int8"),
            "INT8 weights per output channel, rounding nearest, 16-bit activations per token, smoothing alpha 0.6, "
            "not rotated, INT8 head with 16-bit activations calibration",
        ),
        (
            Recipe(rotate=False, exclude=("*.layers.0.*", "*.mlp.proj")),
            "not rotated, INT8 head with 16-bit activations, best 64 rescored in BF16, BF16 where *.layers.0.* or *.mlp.proj calibration",
        ),
        (Recipe("none"), "BF16 weights, float activations calibration"),
    ],
)
def test_every_part_of_the_recipe_is_shown(recipe, text, engine_dirs):
    assert text in shown_of(engine_dirs["INT8"], recipe)


def test_groups_of_a_rotated_stream_are_shown_as_not_smoothed(engine_dirs, tmp_path):
    directory = tmp_path / "engine"
    shutil.copytree(engine_dirs["INT8"], directory)
    groups = {"transformer.layers.0.attention.qkv": {"alpha": None, "statistic": None, "error": 0.01234}}
    (directory / "fidelity.json").write_text(json.dumps({"groups": groups}))
    shown = shown_of(directory, Recipe())
    assert "layers.0.attention.qkv 0.0123 (not smoothed)" in shown and "None" not in shown


def test_verify_shows_a_bar_over_all_bytes(engine_dirs):
    out, progress = io.StringIO(), io.StringIO()
    manifest = Manifest.open(engine_dirs["BF16"])
    verify_engine(
        engine_dirs["BF16"], manifest, Console(file=out), Console(file=progress, force_terminal=True, width=100)
    )
    assert out.getvalue() == "every weight file has the sha256 of the manifest (2 files)\n"
    read = f"{manifest.size / 1e3:.1f}/{manifest.size / 1e3:.1f} kB"
    assert "hashing" in progress.getvalue() and read in progress.getvalue()


def test_features_are_those_that_the_kernels_use(monkeypatch):
    flags = "fpu avx2 fma f16c avx512_bf16 amx_int8 avx_vnni"
    monkeypatch.setattr(machine, "_cpuinfo", lambda *keys: flags if "flags" in keys else "")
    assert machine.cpu_features() == ["avx2", "fma", "f16c", "avx_vnni"]


@pytest.mark.parametrize(
    ("limit", "total", "available"), [("max", 1 << 30, 600 << 20), (f"{512 << 20}", 512 << 20, 112 << 20)]
)
def test_memory_is_that_of_the_machine_or_of_its_control_group(limit, total, available, tmp_path, monkeypatch):
    files = {
        "proc/meminfo": f"MemTotal: {1 << 20} kB\nMemAvailable: {600 << 10} kB\n",
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": f"{limit}\n",
        "sys/fs/cgroup/a/b/memory.current": f"{400 << 20}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 18}.get)
    assert (machine.total_memory(), machine.available_memory()) == (total, available)
