"""What this machine can run: processor, native extension, compiler, GPU and optional stacks.

Everything is looked up without importing a heavy package, and nothing here fails because something is absent.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Features that the native kernels use, in the spelling of /proc/cpuinfo.
FEATURES = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")

# Distribution -> the extra that installs it; "" for those that every installation has.
STACKS = {
    "torch": "",
    "transformers": "",
    "gguf": "gguf",
    "triton": "triton",
    "mpi4py": "mpi",
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt-rtx",
    "tensorrt-llm": "tensorrt-llm",
}


def describe_machine() -> dict[str, str]:
    """Label -> one line of text, for `quasar-trt info` and for the environment of a benchmark."""
    return {
        "quasar-trt": version_of("quasar-trt") or "not installed as a package",
        "Python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{cpu_model()}, {usable_cpus()} usable CPUs",
        "features": " ".join(cpu_features()) or "none of those that the kernels use",
        "memory": memory(),
        "native engine": native_engine(),
        "compiler": compiler(),
        "GPU": gpu() or "none found",
        "MPI": shutil.which("mpirun") or "no mpirun on PATH",
        **{name: version_of(name) or missing(extra) for name, extra in STACKS.items()},
    }


def version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def missing(extra: str) -> str:
    return f"not installed (pip install 'quasar-trt[{extra}]')" if extra else "not installed"


def _cpuinfo(*keys: str) -> str:
    """The first value in /proc/cpuinfo under any of `keys`, or ""."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def cpu_model() -> str:
    return _cpuinfo("model name", "Processor") or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Those of `FEATURES` that this processor reports."""
    found = set(_cpuinfo("flags").split())
    return [feature for feature in FEATURES if feature in found]


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_level_cache() -> int:
    """Bytes of the outermost caches that the usable CPUs share among them, together; 0 where the system does not say."""
    sizes: dict[tuple[str, str], int] = {}
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        caches = Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")
        try:
            level, shared, size = max(_read(cache, "level", "shared_cpu_list", "size") for cache in caches)
            sizes[level, shared] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):  # ValueError: no cache at all, or another unit
            return 0
    return sum(sizes.values())


def _read(directory: Path, *names: str) -> list[str]:
    return [(directory / name).read_text().strip() for name in names]


def memory() -> str:
    try:
        return f"{_physical_memory() / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return "unknown"


def total_memory() -> int:
    """Bytes that this process could take if it were alone: of the machine, or of its control group where that has a limit."""
    group = _group_memory()
    return min(_physical_memory(), group[0]) if group else _physical_memory()


def available_memory() -> int:
    """Bytes that this process may still take: of the machine, and of its control group where that has a limit."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        available = _physical_memory()
    if group := _group_memory():
        limit, used = group
        available = min(available, limit - used)
    return max(available, 0)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_memory() -> tuple[int, int] | None:
    """The limit of this process's control group (version 2) and what it has taken, in bytes; None where there is no limit."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        limit, used = map(int, _read(Path("/sys/fs/cgroup") / group, "memory.max", "memory.current"))
    except (OSError, ValueError):  # ValueError: "max"
        return None
    return limit, used


def native_engine() -> str:
    """Which native kernels the cpu engine would use, or why there is no native engine."""
    from quasar_trt.plugins import native

    if native.UNAVAILABLE:
        return f"not available, the reference engine is used: {native.UNAVAILABLE}"
    best, *others = native.isa_names()
    return f"available, kernels: {best}" + (f" (also runnable: {', '.join(others)})" if others else "")


def native_build() -> str:
    """What tells builds of the native extension apart, "" without one."""
    spec = importlib.util.find_spec("quasar_trt.plugins._native")
    if spec is None:
        return ""
    status = os.stat(spec.origin)
    return f"{status.st_size} bytes, {status.st_mtime_ns} ns"


def _first_line(*command: str) -> str | None:
    """First line that `command` prints, None when it cannot be run."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip().partition("\n")[0] or None


def compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if line := _first_line(name, "--version"):
            return line
    return "none found (g++ or clang++ is needed to compile the native engine)"


def gpu() -> str | None:
    """Name, memory and driver of the first NVIDIA GPU."""
    return _first_line("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
