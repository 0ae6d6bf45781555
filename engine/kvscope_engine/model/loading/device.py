"""Where a model runs and in what numbers: decided once, at load."""

from __future__ import annotations

from pathlib import Path

import torch

from kvscope_telemetry.errors import BadInput

BF16_INSTRUCTIONS = frozenset(("avx512_bf16", "amx_bf16"))


def choose_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA where there is one. Raises BadInput for `cuda` without one."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is found"
        raise BadInput(f"device='cuda' is not accepted: {reason}; `kvscope-engine doctor` says what is missing")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; `auto` is bfloat16 where the hardware multiplies it."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype), f"EngineConfig let dtype {name!r} pass"
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if _cpu_flags() & BF16_INSTRUCTIONS else torch.float32


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now; a very large number where nobody can tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _available_host_bytes()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    for line in _lines(cpuinfo):
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _available_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
