"""Triton kernels compiled ahead of time to PTX, on a machine with or without a GPU, for callers that know nothing of Triton.

The entry's parameters are pointers to the inputs, int32 scalars and pointers to the outputs, in this order and no others.
Pointers are aligned to 16 bytes. The PTX carries no file names, so equal kernels are equal wherever they were compiled.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quasar_trt.plugins.triton_launch import Launch

# Compute capability -> the oldest PTX ISA in which its kernels are written: no newer driver is asked for than needed.
PTX_VERSIONS = {80: 80, 86: 80, 89: 80, 90: 80, 100: 86, 120: 87}
# A kernel gets more only from a caller that asks the driver for it.
MAX_SHARED = 48 << 10

_ENTRY = re.compile(r"\.visible \.entry \w+\((.*?)\n\)", re.DOTALL)
_MARKS = {"pointer": ".u64 .ptr .global", "int32": ".u32"}  # of a parameter in PTX


@dataclass(frozen=True)
class Kernel:
    """Compiled code.

    name: of the entry. parameters: "pointer" or "int32" of each. threads: of a block, all on its x axis. shared: bytes.
    """

    name: str
    sm: int
    ptx: str
    parameters: tuple[str, ...]
    threads: int
    shared: int


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel: registers of a thread, bytes of shared memory of a block, bytes that a thread spills."""

    registers: int
    shared: int
    spilled: int


@functools.cache
def _compile(launch: Launch, floats: tuple[tuple[str, str], ...], sm: int) -> Kernel:
    constants, types = dict(launch.constants), dict(launch.types + floats)
    names = launch.kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        compiled = triton.compile(
            ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", sm, 32),
            options={**launch.options, "ptx_version": PTX_VERSIONS[sm]},
        )
    facts = compiled.metadata
    if facts.shared > MAX_SHARED:
        raise RuntimeError(f"{facts.name} takes {facts.shared} bytes of shared memory; allowed: {MAX_SHARED}")
    declared = ["pointer" if kind.startswith("*") else "int32" for kind in signature.values() if kind != "constexpr"]
    ptx = without_scratch(compiled.asm["ptx"], declared)
    return Kernel(facts.name, sm, ptx, tuple(declared), 32 * facts.num_warps, facts.shared)


def compile_kernel(launch: Launch, floats: Mapping[str, str], sm: int) -> Kernel:
    """Compiles for one compute capability of `PTX_VERSIONS`; a second call with the same arguments costs nothing.

    floats: parameter whose type `launch` leaves open -> "*bf16" or "*fp32".
    Raises ValueError for another compute capability, RuntimeError where Triton interprets instead of compiling.
    """
    if sm not in PTX_VERSIONS:
        raise ValueError(f"compute capability {sm}; one of: {', '.join(map(str, PTX_VERSIONS))}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError("Triton was told to interpret kernels, not to compile them; unset TRITON_INTERPRET")
    return _compile(launch, tuple(floats.items()), sm)


def without_scratch(ptx: str, declared: Sequence[str]) -> str:
    """Removes the pointers to scratch memory that Triton appends to an entry's parameters.

    declared: "pointer" or "int32" of each parameter that stays. Raises RuntimeError when the others are used, or when the
    entry's parameters are not as declared.
    """
    entry = _ENTRY.search(ptx)
    parameters = [parameter.strip() for parameter in entry[1].split(",")]
    kinds = [next((kind for kind, mark in _MARKS.items() if mark in parameter), parameter) for parameter in parameters]
    if kinds != [*declared, *["pointer"] * (len(kinds) - len(declared))]:
        raise RuntimeError(
            f"the entry takes {', '.join(kinds)}; expected {', '.join(declared)} and pointers to scratch memory"
        )
    kept, hidden = parameters[: len(declared)], parameters[len(declared) :]
    ptx = ptx[: entry.start(1)] + ",".join(f"\n\t{parameter}" for parameter in kept) + ptx[entry.end(1) :]
    for name in (parameter.split()[-1] for parameter in hidden):
        if re.search(rf"\b{name}\b", ptx):
            raise RuntimeError(f"the kernel uses scratch memory ({name}), which only Triton's own launcher gives to it")
    return ptx


def assemble(kernel: Kernel) -> tuple[bytes, Resources]:
    """Assembles the PTX with the ptxas that Triton uses: (cubin, what the kernel takes).

    Raises RuntimeError without ptxas, subprocess.CalledProcessError for PTX that is not valid.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.ptx)
        arch = re.search(r"\.target (\w+)", kernel.ptx)[1]
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"-arch={arch}", source, "-o", target]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        return target.read_bytes(), resources(log, kernel.shared)


def resources(log: str, shared: int) -> Resources:
    """Reads what `ptxas -v` prints of one kernel. shared: dynamic shared memory, of which ptxas does not know."""
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spilled = int(re.search(r"(\d+) bytes spill stores", log)[1])
    static = re.search(r"(\d+) bytes smem", log)
    return Resources(registers, shared + (int(static[1]) if static else 0), spilled)
