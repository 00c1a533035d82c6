"""`quasar-trt info --kernels`: the table of what the GPU kernels take, and what it says where it cannot be made."""

from __future__ import annotations

import re
import sys

import pytest
from click.testing import CliRunner

from quasar_trt import kernel_resources
from quasar_trt.cli import cli
from quasar_trt.errors import QuasarError
from quasar_trt.plugins import aot, triton_launch


@pytest.fixture
def one_kernel(monkeypatch):
    kernels = {"a linear": (triton_launch.linear(64, 64, 8, False, 16), {"y": "*bf16"})}
    monkeypatch.setattr(kernel_resources, "layer_kernels", lambda: kernels)


def test_each_kernel_has_a_row_and_each_gpu_a_column(one_kernel):
    shown = CliRunner().invoke(cli, ["info", "--kernels"], catch_exceptions=False).output
    assert re.search(r"kernel +sm_80 +sm_86 +sm_89 +sm_90 +sm_100 +sm_120\n", shown)
    assert re.search(r"a linear( +\d+/\d+){6}\n", shown)


def test_registers_shared_memory_and_spills_are_shown(one_kernel, monkeypatch):
    monkeypatch.setattr(aot, "assemble", lambda kernel: (b"", aot.Resources(96, 20480, 8 if kernel.sm == 120 else 0)))
    assert kernel_resources.kernel_table().rows == [("a linear", *["96/20"] * 5, "96/20+8")]


def test_the_kernels_are_those_of_every_operation():
    names = {launch.kernel.__name__ for launch, _ in kernel_resources.layer_kernels().values()}
    assert names == {"rms_norm_quantize", "smooth_quantize", "silu_mul_smooth_quantize", "linear"}


def test_without_triton_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "quasar_trt.plugins.aot", None)
    monkeypatch.delattr("quasar_trt.plugins.aot")
    with pytest.raises(QuasarError, match=r"pip install 'quasar-trt\[triton\]'") as caught:
        kernel_resources.kernel_table()
    assert "\n" not in str(caught.value)


def test_without_ptxas_one_line_says_so(one_kernel, monkeypatch):
    def missing(kernel):
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(aot, "assemble", missing)
    with pytest.raises(QuasarError, match="cannot be compiled: Cannot find ptxas"):
        kernel_resources.kernel_table()


@pytest.mark.parametrize("arguments", [["somewhere"], ["--verify"]])
def test_the_option_stands_alone(arguments):
    with pytest.raises(QuasarError, match="give it alone"):
        CliRunner().invoke(cli, ["info", "--kernels", *arguments], catch_exceptions=False)
