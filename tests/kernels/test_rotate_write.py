"""Norm, rotation and write in one operation: every implementation equals float64, slot by slot."""

from typing import Any

import pytest
import torch

from kvscope_kernels.kv_formats import dequantize
from kvscope_kernels.rotate_write import CosSin, HeadNorm, Rotation, rotate_write

BLOCK_SIZE = 16
NUM_BLOCKS = 5
SLOTS = [40, -1, 3, 79, 16]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """Heads of five tokens as a fused product returns them, with other numbers in the same row."""

    def __init__(
        self, device: str, heads: tuple[int, int, int], dtype: torch.dtype, has_norm: bool, turns: bool
    ) -> None:
        self.num_heads, self.num_kv_heads, self.dim = heads
        count = self.num_heads + 2 * self.num_kv_heads
        row = random_tensor(len(SLOTS), count * self.dim + 8, dtype=dtype).to(device)
        self.heads = row[:, : count * self.dim].view(len(SLOTS), count, self.dim)
        weight = random_tensor(self.num_heads + self.num_kv_heads, self.dim, seed=1).to(device)
        angle = random_tensor(len(SLOTS), 1, self.dim // 2, seed=2).to(device) * 9
        sin = angle.sin()
        cos = torch.cat((angle.cos(),) * 2, -1).to(dtype)
        self.norm = HeadNorm(weight, torch.tensor(1e-5, device=device)) if has_norm else None
        self.turn = CosSin(cos, torch.cat((-sin, sin), -1).to(dtype)) if turns else None
        self.rotation = Rotation(self.num_heads, self.norm, self.turn)
        self.slots = torch.tensor(SLOTS, device=device)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = self.heads.double()
        rotated, value = wide[:, : -self.num_kv_heads], wide[:, -self.num_kv_heads :]
        if self.norm is not None:
            size = (rotated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            rotated = rotated / size * self.norm.weight.double()
        if self.turn is not None:
            one, other = rotated.chunk(2, -1)
            swapped = torch.cat((other, one), -1)
            rotated = rotated * self.turn.cos.double() + swapped * self.turn.signed_sin.double()
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], value


def make_cache(case: Case, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a cache (2, blocks, slots, heads, dim) without written slots."""
    storage = torch.full((2, NUM_BLOCKS, case.num_kv_heads, BLOCK_SIZE, case.dim), 77, device=device)
    return storage.to(dtype).transpose(2, 3)


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("turns", [False, True], ids=["still", "turned"])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((6, 2, 64), torch.float32),
        ((9, 3, 80), torch.bfloat16),
        ((4, 4, 128), torch.float16),
        ((3, 1, 2), torch.float32),
    ],
    ids=str,
)
def test_rotated_heads_and_written_slots_equal_the_reference(
    runner: Any, heads: tuple[int, int, int], dtype: torch.dtype, has_norm: bool, turns: bool
) -> None:
    case = Case(runner.device, heads, dtype, has_norm, turns)
    k_cache, v_cache = make_cache(case, dtype, runner.device)
    before = case.heads.clone()
    query = runner.ops.rotate_write(case.heads, case.rotation, k_cache, v_cache, case.slots)
    assert query.dtype == dtype
    assert torch.equal(case.heads, before)
    expected, key, value = case.exact()
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(query.double(), expected, rtol=tolerance, atol=tolerance)
    flat_k, flat_v = (cache.reshape(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
    written = [slot for slot in SLOTS if slot >= 0]
    tokens = [token for token, slot in enumerate(SLOTS) if slot >= 0]
    torch.testing.assert_close(flat_k[written].double(), key[tokens], rtol=tolerance, atol=tolerance)
    assert torch.equal(flat_v[written].double(), value[tokens])
    rest = [slot for slot in range(NUM_BLOCKS * BLOCK_SIZE) if slot not in written]
    assert (flat_k[rest] == 77).all()
    assert (flat_v[rest] == 77).all()


@pytest.mark.parametrize("form", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_eight_bit_cache_is_written_within_its_rounding(runner: Any, form: torch.dtype) -> None:
    case = Case(runner.device, (6, 2, 64), torch.float32, True, True)
    caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 64, dtype=torch.uint8, device=runner.device).view(form)] * 2
    k_cache, v_cache = (cache.clone() for cache in caches)
    k_scale, v_scale = (torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, device=runner.device) for _ in range(2))
    given = case.heads, case.rotation, k_cache, v_cache, case.slots, k_scale, v_scale
    runner.ops.rotate_write(*given)
    _, key, value = case.exact()
    for data, scale, expected in ((k_cache, k_scale, key), (v_cache, v_scale, value)):
        found = dequantize(data.cpu(), scale.cpu(), torch.float32).reshape(-1, 2, 64)
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                largest = float(expected[token].abs().max())
                assert (found[slot] - expected[token].cpu()).abs().max() <= largest / 16
        assert not found[[slot for slot in range(80) if slot not in SLOTS]].any()


def test_rotating_and_writing_no_tokens_returns_an_empty_result(runner: Any) -> None:
    case = Case(runner.device, (6, 2, 64), torch.float32, False, False)
    k_cache, v_cache = make_cache(case, torch.float32, runner.device)
    given = case.heads[:0], Rotation(6, None, None), k_cache, v_cache, case.slots[:0]
    assert runner.ops.rotate_write(*given).shape == (0, 6, 64)


def test_rotate_and_write_kernel_names_an_invalid_argument() -> None:
    case = Case("cpu", (6, 2, 64), torch.float32, True, True)
    k_cache, v_cache = make_cache(case, torch.float32, "cpu")
    caches = k_cache, v_cache, case.slots
    with pytest.raises(ValueError, match=r"heads is .* 5 \+ 2 \* 2 heads of 64"):
        rotate_write(case.heads, Rotation(5, None, None), *caches)
    with pytest.raises(ValueError, match=r"cos_sin\.cos is"):
        rotate_write(case.heads, Rotation(6, None, CosSin(case.turn.cos[:2], case.turn.signed_sin)), *caches)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"norm\.weight is"):
        rotate_write(case.heads, Rotation(6, HeadNorm(torch.ones(6, 64), torch.tensor(1e-5)), None), *caches)
    with pytest.raises(ValueError, match="slot_mapping is"):
        rotate_write(case.heads, Rotation(6, None, None), k_cache, v_cache, case.slots.int())
