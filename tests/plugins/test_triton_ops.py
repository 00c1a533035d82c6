"""What only Triton's operations have: tiles, BF16 outputs, rows without a smoother, and where they run."""

from __future__ import annotations

import pytest
import torch
from implementations import IMPLEMENTATIONS

from quasar_trt.plugins import reference, triton
from quasar_trt.plugins.triton_launch import TILES, tile_rows

run = IMPLEMENTATIONS["triton"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear_arguments(rows: int, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    limit = torch.iinfo(dtype).max
    q = torch.randint(-limit, limit + 1, (rows, 150), generator=generator, dtype=dtype)
    weight = torch.randint(-127, 128, (70, 150), generator=generator, dtype=torch.int8)
    return q, normal(rows, seed=2).abs(), weight, normal(70, seed=3).abs()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_gives_the_bits_of_the_reference(tile, dtype):
    arguments = linear_arguments(37, dtype)
    expected = reference.LINEAR[8 * dtype.itemsize](*arguments)
    assert torch.equal(run("linear", *arguments, None, torch.float32, tile), expected)


def test_a_bf16_output_is_the_float32_output_rounded_once():
    arguments, bias = linear_arguments(5), normal(70, seed=4).bfloat16()
    y = run("linear", *arguments, bias, torch.bfloat16)
    expected = reference.w8a8_linear(*arguments, bias)
    # The interpreter cuts bits off; that compiled code rounds is tested on its PTX.
    cut = expected.view(torch.int32).bitwise_and(-1 << 16).view(torch.float32)
    assert torch.equal(y, (expected if torch.cuda.is_available() else cut).bfloat16())


def test_a_pass_takes_the_smallest_tile_that_holds_its_rows():
    tiles = {1: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 128, 128: 128, 129: 128, 5000: 128}
    assert {rows: tile_rows(rows) for rows in tiles} == tiles


def test_no_rows_give_no_rows():
    q, scale = run("smooth_quantize", torch.empty(0, 48), torch.ones(48))
    assert q.shape == (0, 48) and scale.shape == (0,)
    assert run("linear", *linear_arguments(0)).shape == (0, 70)


def test_transposed_inputs_are_read_by_their_values():
    x = normal(40, 3).T
    q, scale = run("smooth_quantize", x, torch.ones(40))
    expected_q, expected_scale = reference.smooth_quantize(x, torch.ones(40))
    assert torch.equal(q, expected_q) and torch.equal(scale, expected_scale)


def test_rows_without_a_smoother_are_only_transformed():
    q, scale = run("smooth_quantize", normal(3, 64), None, 16)
    expected_q, expected_scale = reference.smooth_quantize(normal(3, 64), torch.ones(64), 16)
    torch.testing.assert_close(scale, expected_scale, rtol=2e-6, atol=0)
    assert (q.int() - expected_q.int()).abs().max() <= 1


def test_a_block_wider_than_the_kernels_hold_is_refused():
    with pytest.raises(ValueError, match=r"block has 8192 columns; allowed: .* up to 4096"):
        run("smooth_quantize", torch.ones(1, 16384), torch.ones(16384), 8192)


def test_cpu_tensors_are_refused_where_triton_compiles():
    with pytest.raises(ValueError, match="the input is on cpu; Triton's kernels run on a CUDA device"):
        triton.smooth_quantize(torch.ones(1, 16), torch.ones(16))
