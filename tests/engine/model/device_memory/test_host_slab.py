"""The host memory slab has the requested size and is pinned in place; failure to pin is reported."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from kvscope_engine.model.device_memory import host_slab
from kvscope_engine.model.device_memory.host_slab import HostSlab, measured_torch_pinned_bytes, torch_pinned_bytes
from kvscope_telemetry.errors import BadInput


class FakePinner:
    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, num_bytes: int) -> str:
        if not self.reason:
            self.pinned[address] = num_bytes
        return self.reason

    def unpin(self, address: int) -> str:
        del self.pinned[address]
        return ""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_host_memory_slab_takes_its_bytes_only_when_written_and_returns_them_on_close() -> None:
    before = resident_bytes()
    slab = HostSlab(1000, 100_001)
    assert slab.num_bytes == 100_001_000
    assert 0 <= slab.real_bytes - slab.num_bytes < mmap.PAGESIZE
    assert slab.rows.shape == (1000, 100_001)
    assert slab.rows.data_ptr() % mmap.PAGESIZE == 0
    assert resident_bytes() - before < slab.num_bytes // 10, "it was touched before it was used"
    slab.rows.fill_(1)
    assert resident_bytes() - before >= slab.num_bytes
    slab.close()
    assert resident_bytes() - before < slab.num_bytes // 10, "it was not given back"


def test_slab_is_pinned_in_whole_pages() -> None:
    pinner = FakePinner()
    slab = HostSlab(3, 5000, pinner)
    assert slab.is_pinned
    assert pinner.pinned == {slab.rows.data_ptr(): 16384}
    slab.close()
    assert not pinner.pinned
    slab.close()


def test_host_memory_slab_that_cannot_be_pinned_is_used_and_reported() -> None:
    slab = HostSlab(3, 1 << 20, FakePinner("CUDA error 2"))
    assert not slab.is_pinned
    assert slab.note == "3 MiB of host memory are not pinned (CUDA error 2): copies are slower"
    slab.rows.fill_(5)
    slab.close()


def test_host_memory_slab_larger_than_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "free_host_bytes", lambda: 5 << 20)
    HostSlab(5, 1 << 20).close()
    with pytest.raises(BadInput, match="--kv-host-memory asks for 6 MiB of host memory: 5 MiB are free"):
        HostSlab(6, 1 << 20)


@pytest.mark.parametrize(("asked", "taken"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (9 << 30, 16 << 30)])
def test_torch_rounds_pinned_memory_to_powers_of_two(asked: int, taken: int) -> None:
    assert torch_pinned_bytes(asked) == taken


@pytest.mark.gpu
def test_measured_pinned_memory_of_torch_matches() -> None:
    if measured_torch_pinned_bytes(1) is None:
        pytest.skip("needs a CUDA device")
    assert measured_torch_pinned_bytes(9 << 20) == torch_pinned_bytes(9 << 20)
