"""Measured limits of a device: measured once, kept for a day, and unknown if measuring fails."""

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
    forget_limits()
    yield tmp_path
    forget_limits()


def forget_limits() -> None:
    """Clear what this process knows, like a restart."""
    limits._limits.cache_clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    asked: list[torch.dtype] = []

    def measure(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
        asked.append(dtype)
        return DeviceLimits(5, len(asked))

    monkeypatch.setattr(limits, "measure_limits", measure)
    return asked


def test_cpu_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_CPU_SIDE", 16)
    found = limits.measure_limits(CPU, torch.float32)
    assert found.read_bytes_per_s > 0
    assert found.flops_per_s > 0


def test_slow_dtype_of_a_cpu_does_not_set_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CPU_BYTES", 1 << 20)
    took_s = {torch.bfloat16: 2.0, torch.float32: 1.0}
    monkeypatch.setattr(limits, "measured_product_s", lambda device, side, dtype: took_s[dtype])
    assert limits.measure_limits(CPU, torch.bfloat16).flops_per_s == 2 * 512**3


def test_limits_are_measured_once_per_device_and_dtype(folder: Path, measured: list[torch.dtype]) -> None:
    for _ in range(2):
        assert device_limits(CPU, "a CPU", torch.float32) == DeviceLimits(5, 1)
        forget_limits()
    assert device_limits(CPU, "another", torch.float32) == DeviceLimits(5, 2)
    assert device_limits(CPU, "a CPU", torch.bfloat16) == DeviceLimits(5, 3)
    assert measured == [torch.float32, torch.float32, torch.bfloat16]


def test_limits_older_than_a_day_are_measured_again(folder: Path, measured: list[torch.dtype]) -> None:
    device_limits(CPU, "a CPU", torch.float32)
    place = folder / "device_limits.json"
    kept = {key: [1, 1, time.time() - 2 * 24 * 3600] for key in json.loads(place.read_text("utf-8"))}
    place.write_text(json.dumps(kept), "utf-8")
    forget_limits()
    assert device_limits(CPU, "a CPU", torch.float32) == DeviceLimits(5, 2)


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"a": 1}'])
def test_damaged_limits_file_is_replaced(folder: Path, measured: list[torch.dtype], damage: str) -> None:
    (folder / "device_limits.json").write_text(damage, "utf-8")
    assert device_limits(CPU, "a CPU", torch.float32) == DeviceLimits(5, 1)


def test_limits_that_cannot_be_measured_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
        raise RuntimeError("no memory")

    monkeypatch.setattr(limits, "measure_limits", failing)
    assert device_limits(CPU, "a CPU", torch.float32) == DeviceLimits(0, 0)
