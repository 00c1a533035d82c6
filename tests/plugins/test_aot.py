"""Kernels compiled ahead of time: PTX for every compute capability, assembled to machine code. They are not executed here."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest

from quasar_trt.plugins import aot, triton_launch
from quasar_trt.plugins.aot import Kernel, Resources, compile_kernel

ROW = {"x": "*bf16"}
KERNELS = {
    "rms_norm_quantize": (triton_launch.rms_norm_quantize(576, 1e-5, 8), {**ROW, "weight": "*bf16"}),
    "smooth_quantize": (triton_launch.smooth_quantize(576, True, 64, 16), ROW),
    "silu_mul_smooth_quantize": (
        triton_launch.silu_mul_smooth_quantize(9216, 512, 8),
        {"gate": "*bf16", "up": "*bf16"},
    ),
    "linear of few rows": (triton_launch.linear(1000, 4096, 8, True, 16), {"bias": "*bf16", "y": "*bf16"}),
    "linear of many rows": (triton_launch.linear(1000, 4096, 8, False, 128), {"y": "*fp32"}),
    "linear of 16-bit codes": (triton_launch.linear(1000, 4096, 16, False, 16), {"y": "*fp32"}),
}
PARAMETERS = {
    "rms_norm_quantize": 4 * ("pointer",),
    "smooth_quantize": 4 * ("pointer",),
    "silu_mul_smooth_quantize": 5 * ("pointer",),
    "linear of few rows": (*5 * ("pointer",), "int32", "pointer"),
    "linear of many rows": (*4 * ("pointer",), "int32", "pointer"),
    "linear of 16-bit codes": (*4 * ("pointer",), "int32", "pointer"),
}


def compiled(name: str, sm: int = 80) -> Kernel:
    return compile_kernel(*KERNELS[name], sm)


@pytest.mark.parametrize("sm", aot.PTX_VERSIONS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_valid_code_that_takes_inputs_scalars_and_outputs(name, sm):
    kernel = compiled(name, sm)
    cubin, taken = aot.assemble(kernel)
    assert cubin.startswith(b"\x7fELF") and kernel.name.encode() in cubin
    assert 16 <= taken.registers <= 255 and kernel.shared <= taken.shared <= aot.MAX_SHARED
    assert kernel.parameters == PARAMETERS[name]
    assert set(re.findall(r"_param_(\d+)", kernel.ptx)) == {str(i) for i in range(len(kernel.parameters))}
    assert f".target sm_{sm}" in kernel.ptx and f".reqntid {kernel.threads}\n" in kernel.ptx


@pytest.mark.parametrize("name", KERNELS)
def test_the_code_names_no_file(name):
    assert ".file" not in compiled(name).ptx and ".loc\t" not in compiled(name).ptx


@pytest.mark.parametrize("name", ["rms_norm_quantize", "smooth_quantize", "silu_mul_smooth_quantize"])
def test_quantizing_divides_with_correct_rounding_and_fuses_nothing(name):
    ptx = compiled(name).ptx
    assert "div.rn." in ptx and "fma." not in ptx and "div.full" not in ptx
    assert not re.search(r"\b(?:add|mul|sub)\.f32", ptx)  # without .rn ptxas may fuse them


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("linear")])
def test_linears_sum_int8_products_in_int32(name):
    assert "s32.s8.s8.s32" in compiled(name).ptx


def test_bf16_outputs_are_rounded_to_nearest():
    assert "cvt.rn.bf16" in compiled("linear of few rows").ptx


def test_eps_is_part_of_the_code():
    other = compile_kernel(triton_launch.rms_norm_quantize(576, 1e-6, 8), KERNELS["rms_norm_quantize"][1], 80)
    assert other.ptx != compiled("rms_norm_quantize").ptx


def test_equal_requests_are_compiled_once():
    again = triton_launch.smooth_quantize(576, True, 64, 16), dict(ROW)
    assert compile_kernel(*again, 80) is compiled("smooth_quantize")


def test_an_unknown_compute_capability_is_refused():
    with pytest.raises(ValueError, match="compute capability 75; one of: 80, 86, 89, 90, 100, 120"):
        compiled("smooth_quantize", 75)


def test_code_that_is_not_valid_is_refused():
    broken = compiled("smooth_quantize").ptx.replace("div.rn.", "div.around.", 1)
    with pytest.raises(subprocess.CalledProcessError):
        aot.assemble(replace(compiled("smooth_quantize"), ptx=broken))


def entry(*parameters: str, body: str = "") -> str:
    types = {"pointer": ".param .u64 .ptr .global .align 1", "int32": ".param .u32", "int64": ".param .u64"}
    lines = [f"\n\t{types[kind]} k_param_{i}" for i, kind in enumerate(parameters)]
    return f".visible .entry k({','.join(lines)}\n)\n{{\n{body}}}\n"


def test_unused_pointers_to_scratch_memory_are_removed():
    body = "\tld.param.b64 %rd1, [k_param_0];\n"
    ptx = entry("pointer", "int32", "pointer", "pointer", "pointer", body=body)
    assert aot.without_scratch(ptx, ["pointer", "int32", "pointer"]) == entry("pointer", "int32", "pointer", body=body)


def test_scratch_memory_that_is_used_is_an_error():
    ptx = entry("pointer", "pointer", "pointer", body="\tld.param.b64 %rd1, [k_param_1];\n")
    with pytest.raises(RuntimeError, match=r"uses scratch memory \(k_param_1\)"):
        aot.without_scratch(ptx, ["pointer"])


@pytest.mark.parametrize(
    "found", [("pointer",), ("int32", "pointer"), ("pointer", "int64"), ("pointer", "int32", "int32")]
)
def test_other_parameters_than_declared_are_an_error(found):
    with pytest.raises(RuntimeError, match="expected pointer, int32 and pointers to scratch memory"):
        aot.without_scratch(entry(*found), ["pointer", "int32"])


def test_what_ptxas_prints_is_read():
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
        "    8 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 96 registers, used 1 barriers, 512 bytes smem, 400 bytes cmem[0]\n"
    )
    assert aot.resources(log, 1024) == Resources(registers=96, shared=1536, spilled=24)
