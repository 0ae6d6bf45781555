"""Which of an engine's notes the tests on a GPU take for a fault, in the engine's own words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engine.gpu_notes import faults_in

from kvscope_engine.model.cuda_graphs.capture_failures import CaptureFailures
from kvscope_engine.model.device_memory.host_slab import HostSlab
from kvscope_engine.model.device_memory.paging import NOTE as WSL_NOTE
from kvscope_kernels.tuning import tile_table


class FullDriver:
    """Pins nothing."""

    def pin(self, address: int, num_bytes: int) -> str:
        return "out of memory"

    def unpin(self, address: int) -> str:
        return ""


def test_what_was_lost_is_a_fault() -> None:
    notes: list[str] = []
    CaptureFailures(notes.append).record_and_report(8, "batches of 8", RuntimeError("operation not permitted"))
    slab = HostSlab(1, 4096, FullDriver())
    notes.append(slab.note)
    slab.close()
    assert len(notes) == 2
    assert faults_in(notes) == notes


def test_what_depends_on_the_card_is_none(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as tiles that a user tuned, which are in no test's cache either."""
    monkeypatch.setattr(tile_table, "_gpu_name", lambda _: "A GPU")
    gpu = torch.device("cuda:0")
    assert tile_table.own_table().parent == own_cache
    assert tile_table.describe_own_table(gpu) == ""
    tile_table.write_table(tile_table.own_table(), "A GPU", {"one": {}})
    assert faults_in([WSL_NOTE, tile_table.describe_own_table(gpu)]) == []
