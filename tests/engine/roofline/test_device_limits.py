"""Limits of a device: measured once, kept for a day, unknown rather than a failed start."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvscope_engine.roofline import device_limits as limits
from kvscope_engine.roofline.device_limits import DeviceLimits, device_limits

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    start_segment()
    yield tmp_path
    start_segment()


def start_segment() -> None:
    """As another start: what this process knew is forgotten."""
    limits._limits.cache_clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    asked: list[torch.dtype] = []

    def measure(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
        asked.append(dtype)
        return DeviceLimits(5, len(asked))

    monkeypatch.setattr(limits, "measure", measure)
    return asked


def test_a_cpu_reads_and_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_CPU_SIDE", 16)
    found = limits.measure(CPU, torch.float32)
    assert found.read_bytes_per_s > 0
    assert found.flops_per_s > 0


def test_a_type_that_a_cpu_is_slow_at_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CPU_BYTES", 1 << 20)
    took_s = {torch.bfloat16: 2.0, torch.float32: 1.0}
    monkeypatch.setattr(limits, "measured_product_s", lambda device, side, dtype: took_s[dtype])
    assert limits.measure(CPU, torch.bfloat16).flops_per_s == 2 * 512**3


def test_it_is_measured_once_a_device_and_type(folder: Path, measured: list[torch.dtype]) -> None:
    for _ in range(2):
        assert device_limits(CPU, "a CPU", torch.float32) == DeviceLimits(5, 1)
        start_segment()
    assert device_limits(CPU, "another", torch.float32) == DeviceLimits(5, 2)
    assert device_limits(CPU, "a CPU", torch.bfloat16) == DeviceLimits(5, 3)
    assert measured == [torch.float32, torch.float32, torch.bfloat16]


def test_what_is_older_than_a_day_is_measured_again(folder: Path, measured: list[torch.dtype]) -> None:
    device_limits(CPU, "a CPU", torch.float32)
    place = folder / "device_limits.json"
    kept = {key: [1, 1, time.time() - 2 * 24 * 3600] for key in json.loads(place.read_text("utf-8"))}
    place.write_text(json.dumps(kept), "utf-8")
    start_segment()
    assert device_limits(CPU, "a CPU", torch.float32) == DeviceLimits(5, 2)


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"a": 1}'])
def test_a_damaged_file_is_written_anew(folder: Path, measured: list[torch.dtype], damage: str) -> None:
    (folder / "device_limits.json").write_text(damage, "utf-8")
    assert device_limits(CPU, "a CPU", torch.float32) == DeviceLimits(5, 1)


def test_what_cannot_be_measured_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
        raise RuntimeError("no memory")

    monkeypatch.setattr(limits, "measure", failing)
    assert device_limits(CPU, "a CPU", torch.float32) == DeviceLimits(0, 0)
