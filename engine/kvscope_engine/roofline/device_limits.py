"""What the device can do at most: bytes a second out of its memory, and FLOPs a second, measured once and kept.

A tenth of a second the first time, nothing after it: figures are kept for a day by device, threads, type and torch's
version. They are for pictures; whatever goes wrong makes them unknown, and nothing fails.
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
_KEPT_S: Final = 24 * 3600.0
"""Whatever else ran while it was measured is over by then."""
_BUDGET_S: Final = 0.04
"""Of each of the two, once all is warm."""
_LEAST_RUNS, _MOST_RUNS = 8, 20
"""Others that compute on the same cores spoil some."""
_CPU_BYTES: Final = 64 << 20
"""More than caches hold."""
_GPU_BYTES: Final = 256 << 20
_CPU_SIDE, _GPU_SIDE = 512, 4096


class DeviceLimits(NamedTuple):
    """0: unknown."""

    read_bytes_per_s: int = 0
    flops_per_s: int = 0


def device_limits(device: torch.device, name: str, dtype: torch.dtype) -> DeviceLimits:
    """Of `device`, called `name`, for products in `dtype`; measured where nobody has today."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return _limits(str(device), f"{name}|{threads}|{dtype}|{torch.__version__}")


@cache
def _limits(device: str, key: str) -> DeviceLimits:
    kept = _read().get(key)
    if isinstance(kept, list) and len(kept) == 3 and 0 <= time.time() - kept[2] < _KEPT_S:
        return DeviceLimits(int(kept[0]), int(kept[1]))
    dtype: torch.dtype = getattr(torch, key.split("|")[2].removeprefix("torch."))
    try:
        found = measure(torch.device(device), dtype)
    except Exception:  # no start fails for a picture
        return DeviceLimits()
    _keep(key, found)
    return found


@torch.inference_mode()
def measure(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
    """Both, now. Raises what torch raises where there is no memory for it.

    A CPU without instructions for `dtype` is slower at it than at float32, and no limit to operations that widen it.
    """
    is_gpu = device.type == "cuda"
    large = torch.ones((_GPU_BYTES if is_gpu else _CPU_BYTES) // 4, dtype=torch.float32, device=device)
    read_s = _best_s(device, large.clone if is_gpu else large.sum)
    num_bytes = large.nbytes * (2 if is_gpu else 1)
    del large
    side = _GPU_SIDE if is_gpu else _CPU_SIDE
    product_s = min(measured_product_s(device, side, each) for each in ({dtype} if is_gpu else {dtype, torch.float32}))
    if is_gpu:
        torch.cuda.empty_cache()
    return DeviceLimits(round(num_bytes / read_s), round(2 * side**3 / product_s))


def measured_product_s(device: torch.device, side: int, dtype: torch.dtype) -> float:
    """Of two square matrices."""
    left, right = (torch.ones((side, side), dtype=dtype, device=device) for _ in range(2))
    return _best_s(device, lambda: left @ right)


def _best_s(device: torch.device, run: Callable[[], object]) -> float:
    """Of several runs the quickest, once it is warm."""
    run()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or (sum(times) < _BUDGET_S and len(times) < _MOST_RUNS):
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


def _read() -> dict[str, object]:
    try:
        kept = json.loads((cache_folder() / _FILE).read_text("utf-8"))
    except (OSError, ValueError, KvscopeError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(key: str, found: DeviceLimits) -> None:
    with contextlib.suppress(OSError, KvscopeError):
        place = cache_folder() / _FILE
        new = place.with_name(f"{_FILE}.{os.getpid()}")
        new.write_text(json.dumps({**_read(), key: [*found, time.time()]}), "utf-8")
        os.replace(new, place)
