"""GPU pages with a fake driver: the calls, their order, and refused calls."""

from __future__ import annotations

import sys
from fractions import Fraction
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from kvscope_engine.model.kv_cache.virtual_memory.cuda_driver import CudaDriver, open_driver
from kvscope_engine.model.kv_cache.virtual_memory.cuda_pages import CudaPages, tensor_at
from kvscope_engine.policy.allocation.address_space import AddressSpace
from kvscope_telemetry.errors import KvscopeError

MIB = 1 << 20
SPACE = AddressSpace(num_slots=2, slot_blocks=6, num_groups=3, group_blocks=Fraction(2), group_pages=(1, 2))
BLOCK_BYTES = (MIB, 2 * MIB)
"""Two layers with pages of two blocks and one block; 6 MiB and 12 MiB per slot."""


def make(cuda: Any) -> CudaPages:
    driver = CudaDriver(cuda, 3)
    return CudaPages(driver, BLOCK_BYTES, SPACE, 2 * MIB, torch.device("cpu"), synchronize=cuda.synchronize)


def test_all_pages_are_created_at_the_start_and_released_in_reverse(cuda: Any) -> None:
    pages = make(cuda)
    assert (cuda.reserved, len(cuda.handles), pages.num_bytes) == (36 * MIB, 9 + 1, 18 * MIB)
    assert pages.resident_bytes() == 0
    pages.map(0, 2)
    pages.map(6, 4)
    assert pages.resident_bytes() == (1 + 2 + 2 + 4) * 2 * MIB
    del cuda.calls[:]
    pages.close()
    assert cuda.names[:2] == ["cuCtxSetCurrent", "synchronize"]
    assert cuda.names[2:] == [*["cuMemUnmap"] * 9, *["cuMemRelease"] * 10, "cuMemAddressFree"]
    unmapped = [arguments[0] for name, arguments in cuda.calls if name == "cuMemUnmap"]
    second_layer = cuda.base + 12 * MIB
    assert unmapped[0] == second_layer + (6 + 3) * 2 * MIB
    assert unmapped[-1] == cuda.base
    assert (cuda.handles, cuda.reserved) == (set(), 0)
    pages.close()
    assert len(cuda.calls) == 22, "close must be idempotent"


def test_start_of_each_tensor_is_always_mapped(cuda: Any) -> None:
    """Triton refuses a tensor whose first address is not mapped."""
    pages = make(cuda)
    beginnings = {cuda.base, cuda.base + 12 * MIB}
    assert set(cuda.mapped) == cuda.allowed == beginnings
    (floor,) = set(cuda.mapped.values())
    cuda.is_busy = True
    pages.map(0, 2)
    assert set(cuda.mapped) == cuda.allowed == beginnings | {cuda.base + 14 * MIB}
    assert floor not in cuda.mapped.values(), "blocks have pages of their own"
    pages.unmap(0, 2)
    assert set(cuda.mapped) == cuda.allowed == beginnings
    assert set(cuda.mapped.values()) == {floor}
    pages.map(2, 4)
    assert beginnings < set(cuda.mapped)
    pages.close()
    assert (cuda.handles, cuda.reserved) == (set(), 0)


def test_gpu_page_access_is_set_after_all_pages_of_a_layer_are_mapped(cuda: Any) -> None:
    pages = make(cuda)
    del cuda.calls[:]
    pages.map(2, 2)
    assert cuda.names == ["cuCtxSetCurrent", *["cuMemMap", "cuMemSetAccess"], *["cuMemMap"] * 2, "cuMemSetAccess"]
    layer = cuda.base + 12 * MIB
    beginnings = {cuda.base, layer}
    assert set(cuda.mapped) - beginnings == {cuda.base + 2 * MIB, layer + 4 * MIB, layer + 6 * MIB}
    assert set(cuda.mapped) == cuda.allowed


def test_unmap_waits_for_the_device(cuda: Any) -> None:
    pages = make(cuda)
    pages.map(0, 4)
    cuda.is_busy = True
    del cuda.calls[:]
    pages.unmap(2, 2)
    assert cuda.names == ["cuCtxSetCurrent", "synchronize", *["cuMemUnmap"] * 3]
    assert set(cuda.mapped) == cuda.allowed == {cuda.base, cuda.base + 12 * MIB, cuda.base + 14 * MIB}
    pages.map(6, 4)  # reuses the pages
    assert len(cuda.mapped) == 9
    assert pages.resident_bytes() == 9 * 2 * MIB


def test_mapping_a_mapped_cuda_page_group_again_is_an_error(cuda: Any) -> None:
    pages = make(cuda)
    pages.map(0, 2)
    with pytest.raises(AssertionError, match="page 0 is mapped twice"):
        pages.map(0, 2)


@pytest.mark.parametrize(
    ("name", "call"), [("cuMemAddressReserve", 1), ("cuMemCreate", 1), ("cuMemCreate", 5), ("cuMemCreate", 10)]
)
def test_cuda_call_that_fails_at_the_start_releases_all_pages_and_addresses(cuda: Any, name: str, call: int) -> None:
    cuda.fail[name] = call
    with pytest.raises(KvscopeError) as refusal:
        make(cuda)
    assert str(refusal.value) == (
        f"no memory for the KV cache: 9 pages of 2.00 MiB behind 36 MiB of addresses ({name} failed:"
        " CUDA_ERROR_OUT_OF_MEMORY); give a smaller --kv-memory, --max-model-len or --max-num-seqs"
    )
    assert (cuda.handles, cuda.reserved) == (set(), 0)


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess", "cuMemUnmap"])
def test_refused_cuda_map_or_unmap_is_named_in_the_error_and_close_releases_all_pages(cuda: Any, name: str) -> None:
    pages = make(cuda)
    cuda.fail[name] = cuda.counts.get(name, 0) + 2

    def map_and_unmap() -> None:
        for first in (0, 6):
            pages.map(first, 2)
            pages.unmap(first, 2)

    with pytest.raises(KvscopeError, match=f"^{name} failed: CUDA_ERROR_OUT_OF_MEMORY$"):
        map_and_unmap()
    pages.close()
    assert (cuda.handles, cuda.reserved) == (set(), 0)


def test_page_size_is_the_granularity_of_the_driver(cuda: Any) -> None:
    assert CudaDriver(cuda, 3).granularity() == 2 * MIB


def test_missing_driver_is_reported() -> None:
    bindings = MagicMock()
    bindings.cuCtxGetCurrent.side_effect = RuntimeError("libcuda.so.1 is not found\nsearched in")
    with pytest.raises(KvscopeError, match=r"^cuCtxGetCurrent failed: libcuda.so.1 is not found$"):
        CudaDriver(bindings, 0)


def test_missing_bindings_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(KvscopeError, match="needs the package cuda-bindings: pip install"):
        open_driver(torch.device("cuda"))


def test_tensor_is_placed_at_its_address() -> None:
    """Uses host memory; the call is the same."""
    memory = np.zeros(24, np.float32)
    tensor = tensor_at(memory.ctypes.data + 16, (2, 5), torch.float32, torch.device("cpu"))
    tensor[1, 4] = 7.0
    assert memory.nonzero()[0].tolist() == [4 + 9]
    assert (tensor.is_contiguous(), tensor.data_ptr()) == (True, memory.ctypes.data + 16)


def test_layers_are_placed_one_after_the_other(cuda: Any) -> None:
    pages = make(cuda)
    cuda_tensor = pages.tensor(1, (12, 2 * MIB), torch.uint8)
    assert cuda_tensor.data_ptr() == cuda.base + 12 * MIB
    assert cuda_tensor.shape == (12, 2 * MIB)
