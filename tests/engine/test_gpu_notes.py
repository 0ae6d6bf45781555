"""Which notices of an engine the tests on a GPU treat as faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engine.gpu_notes import faults_in

from kvscope_engine.model.cuda_graphs.capture_failures import CaptureFailures
from kvscope_engine.model.device_memory.host_slab import HostSlab
from kvscope_engine.model.device_memory.paging import NOTE as WSL_NOTE
from kvscope_kernels.tuning import tile_table


class FailingPinDriver:
    """A driver that refuses to pin memory."""

    def pin(self, address: int, num_bytes: int) -> str:
        return "out of memory"

    def unpin(self, address: int) -> str:
        return ""


def test_notices_of_a_failed_capture_and_pin_are_faults() -> None:
    notes: list[str] = []
    CaptureFailures(notes.append).record_and_report(8, "batches of 8", RuntimeError("operation not permitted"))
    slab = HostSlab(1, 4096, FailingPinDriver())
    notes.append(slab.note)
    slab.close()
    assert len(notes) == 2
    assert faults_in(notes) == notes


def test_notices_that_depend_on_the_gpu_are_no_faults(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned tiles of a user are one example; no test has them in its cache."""
    monkeypatch.setattr(tile_table, "_gpu_name", lambda _: "A GPU")
    gpu = torch.device("cuda:0")
    assert tile_table.user_table_path().parent == own_cache
    assert tile_table.describe_user_table(gpu) == ""
    tile_table.write_table(tile_table.user_table_path(), "A GPU", {"one": {}})
    assert faults_in([WSL_NOTE, tile_table.describe_user_table(gpu)]) == []
