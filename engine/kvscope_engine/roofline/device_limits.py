"""Measured limits of a device: memory read bandwidth (bytes/s) and matmul throughput (FLOP/s).

A measurement takes about 0.1 s and is cached on disk for a day, by device, number of threads, dtype and torch version.
The figures are only displayed, so any failure makes them unknown (0) and is not reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import torch

from kvscope_engine.cache_folder import cache_folder
from kvscope_telemetry.errors import KvscopeError

_FILE: Final = "device_limits.json"
_CACHE_TTL_S: Final = 24 * 3600.0
"""Seconds for which a cached measurement is reused. It expires because other load may have distorted it."""
_BUDGET_S: Final = 0.04
_MIN_RUNS, _MAX_RUNS = 8, 20
"""Minimum and maximum number of runs per measurement.

The fastest run counts, because other processes on the same cores slow down some runs.
"""
_CPU_BYTES: Final = 64 << 20
"""Bytes of the array that is read to measure a CPU's bandwidth, larger than the caches."""
_GPU_BYTES: Final = 256 << 20
_CPU_SIDE, _GPU_SIDE = 512, 4096


class DeviceLimits(NamedTuple):
    """Measured limits of a device. A limit of 0 means unknown."""

    read_bytes_per_s: int = 0
    flops_per_s: int = 0


def device_limits(device: torch.device, name: str, dtype: torch.dtype) -> DeviceLimits:
    """Return the limits of `device` for matmuls in `dtype`, measured now or in the last 24 hours.

    `name` is the device's model name.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return _limits(str(device), f"{name}|{threads}|{dtype}|{torch.__version__}")


@cache
def _limits(device: str, key: str) -> DeviceLimits:
    cached = _read_cached().get(key)
    if isinstance(cached, list) and len(cached) == 3 and 0 <= time.time() - cached[2] < _CACHE_TTL_S:
        return DeviceLimits(int(cached[0]), int(cached[1]))
    dtype: torch.dtype = getattr(torch, key.split("|")[2].removeprefix("torch."))
    try:
        limits = measure_limits(torch.device(device), dtype)
    except Exception:  # figures for display must not prevent a start
        return DeviceLimits()
    _write_cached(key, limits)
    return limits


@torch.inference_mode()
def measure_limits(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
    """Measure both limits. Raises torch's error if memory is short.

    On a CPU, matmuls are also measured in float32, and the faster type counts: a CPU without instructions for `dtype`
    is slower in it, but operations that widen to float32 are not limited by that.
    """
    is_gpu = device.type == "cuda"
    large = torch.ones((_GPU_BYTES if is_gpu else _CPU_BYTES) // 4, dtype=torch.float32, device=device)
    read_s = _min_run_s(device, large.clone if is_gpu else large.sum)
    num_bytes = large.nbytes * (2 if is_gpu else 1)
    del large
    side = _GPU_SIDE if is_gpu else _CPU_SIDE
    product_s = min(measured_product_s(device, side, each) for each in ({dtype} if is_gpu else {dtype, torch.float32}))
    if is_gpu:
        torch.cuda.empty_cache()
    return DeviceLimits(round(num_bytes / read_s), round(2 * side**3 / product_s))


def measured_product_s(device: torch.device, side: int, dtype: torch.dtype) -> float:
    left, right = (torch.ones((side, side), dtype=dtype, device=device) for _ in range(2))
    return _min_run_s(device, lambda: left @ right)


def _min_run_s(device: torch.device, run: Callable[[], object]) -> float:
    run()
    times: list[float] = []
    while len(times) < _MIN_RUNS or (sum(times) < _BUDGET_S and len(times) < _MAX_RUNS):
        times.append(max(_seconds(device, run), 1e-9))
    return min(times)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    if device.type != "cuda":
        began_s = time.perf_counter()
        run()
        return time.perf_counter() - began_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _read_cached() -> dict[str, object]:
    try:
        cached = json.loads((cache_folder() / _FILE).read_text("utf-8"))
    except (OSError, ValueError, KvscopeError):
        return {}
    return cached if isinstance(cached, dict) else {}


def _write_cached(key: str, limits: DeviceLimits) -> None:
    with contextlib.suppress(OSError, KvscopeError):
        path = cache_folder() / _FILE
        temporary = path.with_name(f"{_FILE}.{os.getpid()}")
        temporary.write_text(json.dumps({**_read_cached(), key: [*limits, time.time()]}), "utf-8")
        os.replace(temporary, path)
