"""The two 8-bit cache formats: every number, rounding, zeros, and the error of reading back."""

from typing import Any

import pytest
import torch

from kvscope_kernels.kv_formats import LARGEST, dequantize, quantize

FORMATS = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_8_bit_cache_number_is_dequantized_exactly(form: torch.dtype, dtype: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8).view(form)
    expected = data.float()
    data, expected = data[~expected.isnan()], expected[~expected.isnan()]
    scale = torch.full((len(data),), 0.25)
    assert torch.equal(dequantize(data[:, None], scale, dtype)[:, 0], (expected * 0.25).to(dtype))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_quantized_vector_keeps_its_largest_number_and_zeros(form: torch.dtype) -> None:
    rows = torch.randn(50, 3, 80) * torch.logspace(-30, 30, 50)[:, None, None]
    rows[..., 7] = 0.0
    rows[4] = 0.0
    data, scale = quantize(rows, form)
    assert data.dtype == form
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale * LARGEST[form], rows.abs().amax(-1))
    back = dequantize(data, scale, torch.float32)
    assert back[4].eq(0).all()
    assert back[..., 7].eq(0).all()
    error = (back - rows).abs() / rows.abs().amax(-1, keepdim=True).clamp(min=1e-38)
    assert (
        error.max() <= {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16 / 448}[form] * 1.001
    )  # half of the widest step


def test_int8_rounds_to_the_nearest_number() -> None:
    data, _ = quantize(torch.tensor([[127.0, 1.4, -1.6, 0.5, 1.5, -127.0]]), torch.int8)
    assert data.tolist() == [[127, 1, -2, 0, 2, -127]]


@pytest.mark.interpreted_in_storms(
    {"form": torch.float8_e4m3fn, "dtype": torch.float16},
    {"form": torch.int8, "dtype": torch.float32},
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_implementation_writes_the_same_bits_into_an_8_bit_cache(
    form: torch.dtype, dtype: torch.dtype, runner: Any
) -> None:
    """Vectors have all sizes, with numbers so much smaller than the largest that e4m3 stores them as subnormals."""
    num_tokens, num_kv_heads, dim = 60, 3, 80
    rows = torch.randn(num_tokens, num_kv_heads, dim) * torch.logspace(-4, 3, num_tokens)[:, None, None]
    rows[:, :, 5:40] *= torch.logspace(-6, 0, 35)
    rows[9] = 0.0
    new = rows.to(dtype)
    storage = torch.full((8, 2, num_kv_heads, 16, dim), 0x55, dtype=torch.uint8, device=runner.device)
    scales = torch.full((8, 2, num_kv_heads, 16), -7.0, device=runner.device)
    caches = [storage.view(form)[:, i].transpose(1, 2) for i in range(2)]
    parts = [scales[:, i].transpose(1, 2) for i in range(2)]
    slots = torch.randperm(128)[:num_tokens]
    slots[::4] = -1
    on_device = new.to(runner.device)
    runner.ops.kv_write(on_device, -on_device, *caches, slots.to(runner.device), *parts)
    expected, expected_scale = quantize(new, form)
    written = slots >= 0
    blocks, offsets = slots[written] // 16, slots[written] % 16
    for part, (cache, scale) in enumerate(zip(caches, parts, strict=True)):
        found = cache.cpu().view(torch.uint8)[blocks, offsets]
        signed = expected if part == 0 else quantize(-new, form)[0]
        assert torch.equal(found, signed.view(torch.uint8)[written])
        assert torch.equal(scale.cpu()[blocks, offsets], expected_scale[written])
    untouched = torch.ones(8, 16, dtype=torch.bool)
    untouched[blocks, offsets] = False
    assert caches[0].cpu().view(torch.uint8)[untouched].eq(0x55).all()
    assert parts[1].cpu()[untouched].eq(-7.0).all()
