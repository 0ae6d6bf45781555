"""New keys and values are written to their slots, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvscope_kernels.kv_write import kv_write, kv_write_torch

NUM_BLOCKS = 9


def random_caches(
    layout: str, block_size: int, num_kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """Return key and value views (num_blocks, block_size, num_kv_heads, dim) of random storage."""
    middle = (num_kv_heads, block_size) if layout == "HND" else (block_size, num_kv_heads)
    storage = torch.randn(NUM_BLOCKS, 2, *middle, max(dims)).to(dtype)
    if layout == "HND":
        storage = storage.transpose(2, 3)
    return [storage[:, i, ..., : dims[i]] for i in range(2)]


@pytest.mark.interpreted_in_storms({"num_kv_heads": 40, "dtype": torch.bfloat16})
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "dims"),
    [(16, 3, (64, 64)), (7, 2, (80, 48)), (1, 1, (128, 128)), (16, 40, (64, 64))],
)
def test_kv_write_changes_only_the_given_cache_slots(
    block_size: int, num_kv_heads: int, dims: tuple[int, int], layout: str, dtype: torch.dtype, runner: Any
) -> None:
    num_tokens = NUM_BLOCKS * block_size // 2
    cache = [view.to(runner.device) for view in random_caches(layout, block_size, num_kv_heads, dims, dtype)]
    expected = [view.cpu().clone() for view in cache]
    new = [torch.randn(num_kv_heads, num_tokens, dim).to(dtype).transpose(0, 1) for dim in dims]  # as models give them
    slots = torch.randperm(NUM_BLOCKS * block_size)[:num_tokens]
    slots[::3] = -1
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for view, rows in zip(expected, new, strict=True):
                view[slot // block_size, slot % block_size] = rows[token]
    runner.ops.kv_write(*(rows.to(runner.device) for rows in new), *cache, slots.to(runner.device))
    for view, wanted in zip(cache, expected, strict=True):
        assert torch.equal(view.cpu(), wanted)


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_kv_write_without_slots_changes_nothing(slots: list[int], runner: Any) -> None:
    cache = [view.to(runner.device) for view in random_caches("HND", 16, 3, (64, 64), torch.float32)]
    before = [view.clone() for view in cache]
    new = torch.randn(len(slots), 3, 64, device=runner.device)
    runner.ops.kv_write(new, new, *cache, torch.tensor(slots, dtype=torch.int64, device=runner.device))
    assert all(torch.equal(view, kept) for view, kept in zip(cache, before, strict=True))


BAD: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "two axes": ("key", lambda a: {"key": a["key"][0]}),
    "more heads than the cache": ("key", lambda a: {"key": torch.randn(4, 5, 64), "value": torch.randn(4, 5, 64)}),
    "fewer values": ("value", lambda a: {"value": a["value"][:3]}),
    "another value dim": ("value", lambda a: {"value": a["value"][..., :32]}),
    "another dtype": ("k_cache", lambda a: {"k_cache": a["k_cache"].to(torch.bfloat16)}),
    "a flat cache": ("v_cache", lambda a: {"v_cache": a["v_cache"].flatten(0, 1)}),
    "strided head dim": ("k_cache", lambda a: {"k_cache": torch.randn(9, 16, 3, 128)[..., ::2]}),
    "int32 slots": ("slot_mapping", lambda a: {"slot_mapping": a["slot_mapping"].int()}),
    "too few slots": ("slot_mapping", lambda a: {"slot_mapping": a["slot_mapping"][1:]}),
}


@pytest.mark.parametrize("op", [kv_write, kv_write_torch])
@pytest.mark.parametrize("name", BAD)
def test_kv_write_names_an_invalid_argument(name: str, op: Callable[..., None]) -> None:
    k_cache, v_cache = random_caches("NHD", 16, 3, (64, 64), torch.float32)
    good = {"key": torch.randn(4, 3, 64), "value": torch.randn(4, 3, 64), "k_cache": k_cache, "v_cache": v_cache}
    good["slot_mapping"] = torch.arange(4)
    argument, change = BAD[name]
    with pytest.raises(ValueError, match=f"^{argument} is "):
        op(**good | change(good))
