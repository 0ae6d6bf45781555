"""Products of few rows: every implementation equals float64, even where the GPU uses torch."""

from typing import Any

import pytest
import torch

from kvscope_kernels.linear.skinny_linear import (
    ALWAYS,
    MAX_ROWS,
    NEVER,
    default_few_rows,
    linear,
    linear_tiles,
    supports_product,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 40, 1024), (1, 5, 24), (2, 70, 136), (MAX_ROWS, 64, 256), (MAX_ROWS + 1, 33, 40), (3, 9, 7)],
)
def test_linear_product_of_few_rows_equals_the_float64_reference(
    runner: Any, rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=draw).to(dtype).to(runner.device)
    weight = (torch.randn(outputs, inputs, generator=draw) / inputs**0.5).to(dtype).to(runner.device)
    bias = torch.randn(outputs, generator=draw).to(dtype).to(runner.device)
    for given in (None, bias):
        found = runner.ops.linear(x, weight, given)
        wide = torch.nn.functional.linear(x.double(), weight.double(), None if given is None else given.double())
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wide, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 4, MAX_ROWS + 1])
def test_linear_product_of_few_rows_can_return_float32_sums(runner: Any, rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 64, generator=draw).bfloat16().to(runner.device) for n in (rows, 48))
    found = runner.ops.linear(x, weight, dtype=torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)


def test_linear_product_of_few_rows_reads_nothing_outside_its_tensors(runner: Any) -> None:
    """Memory outside the rows and columns of a tile is NaN."""
    x = torch.full((3, 64), torch.nan).bfloat16().to(runner.device)
    x[:2] = 1.0
    weight = torch.full((80, 64), torch.nan).bfloat16().to(runner.device)
    weight[:70] = 0.5
    for rows in (1, 2):
        found = runner.ops.linear(x[:rows], weight[:70])
        assert found.tolist() == [[32.0] * 70] * rows


def test_linear_product_of_few_rows_supports_more_dimensions_and_empty_inputs(runner: Any) -> None:
    x = torch.ones(2, 3, 32, dtype=torch.bfloat16, device=runner.device)
    weight = torch.ones(5, 32, dtype=torch.bfloat16, device=runner.device)
    assert runner.ops.linear(x, weight).tolist() == [[[32.0] * 5] * 3] * 2
    assert runner.ops.linear(x[:0], weight).shape == (0, 3, 5)
    assert runner.ops.linear(x.transpose(0, 1)[0], weight).tolist() == [[32.0] * 5] * 2


def test_kernel_for_few_rows_is_used_only_for_supported_row_counts_and_weights() -> None:
    weight = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert [ALWAYS.includes(rows) for rows in (0, 1, 2, MAX_ROWS, MAX_ROWS + 1)] == [False, True, True, True, False]
    assert not any(NEVER.includes(rows) for rows in range(MAX_ROWS + 2))
    assert supports_product(weight)
    assert not supports_product(weight.float()), "sums of float32 products are another kernel's"
    assert not supports_product(weight[:, ::2]), "a row is one run"
    assert not supports_product(weight[:, :4].contiguous()), "a weight without 16-byte rows was accepted"
    assert [default_few_rows(each) for each in (80, 86, 89, 90, 100, 120)] == [
        NEVER,
        NEVER,
        NEVER,
        ALWAYS,
        NEVER,
        NEVER,
    ]


def test_tile_sizes_of_products_of_few_rows_fit_the_weight_shape() -> None:
    """The inputs of a row are whole tiles where possible; few programs get a deeper pipeline or are split."""
    assert linear_tiles(1, 4096, 14336, 132, 90)[:3] == (1, 4, 2048)
    assert linear_tiles(1, 4096, 2560, 132, 90)[:3] == (1, 16, 512)
    assert linear_tiles(1, 3, 100, 132, 90)[:3] == (1, 4, 128)
    assert linear_tiles(2, 4096, 4096, 132, 90).num_stages == 7
    assert linear_tiles(16, 28672, 4096, 132, 90).num_stages == 5
    assert [linear_tiles(16, outputs, 4096, 128, 89).tile_n for outputs in (4096, 28672)] == [32, 64]


def test_linear_product_of_few_rows_names_an_invalid_argument() -> None:
    x, weight = torch.zeros(2, 4), torch.zeros(3, 4)
    for given, named in (
        ((x, weight[0]), "weight is"),
        ((x[:, :3], weight), "x is"),
        ((x.bfloat16(), weight), "x is"),
        ((x, weight, torch.zeros(4)), "bias is"),
        ((x, weight, None, torch.float16), "dtype is"),
    ):
        with pytest.raises(ValueError, match=named):
            linear(*given)
