"""`bench memory` with small sizes: every figure is present, and unmeasured ones are marked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvscope_engine.cli.main import main


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))


def test_memory_benchmark_json_report_has_every_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--mib", "1", "--repeats", "1", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["moves"]["gb_per_s"]) == {
        "to host",
        "from host",
        "to disk, queued",
        "to disk, written",
        "from disk",
    }
    assert all(rate > 0 for rate in report["moves"]["gb_per_s"].values())
    assert report["moves"]["block_bytes"] == 368_640
    large = report["host_memory"][-1]
    assert large["asked_bytes"] == large["exact_bytes"] < large["torch_pinned_bytes"]
    assert torch.cuda.is_available() or not any(row["torch_is_measured"] for row in report["host_memory"])
    assert all(rate > 0 for rate in report["checksums_gb_per_s"].values())


def test_memory_benchmark_table_shows_sizes_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--mib", "1", "--repeats", "1", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "2 blocks of 360 KiB; host memory not pinned" in text
    assert "to disk, written" in text


@pytest.mark.parametrize("option", ["--mib", "--repeats"])
def test_memory_benchmark_refuses_zero_sizes_and_repeats(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", option, "0"]) == 2
    assert "at least 1 each" in capsys.readouterr().err
