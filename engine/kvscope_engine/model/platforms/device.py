"""Chooses the device and dtype of a model, once, at load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

import torch

from kvscope_telemetry.devices.gpus import Gpus, bare_uuid
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.devices import Gpu

MIN_CAPABILITY: Final = (8, 0)
"""That the kernels are made for: below, prefill's tiles do not fit a multiprocessor's shared memory."""
_DRIVERS: Final = {11: "450", 12: "525", 13: "580"}
"""The oldest driver for each version of CUDA."""
_MIG_UUID: Final = 40
"""Characters of a whole one."""
BF16_INSTRUCTIONS = frozenset(("avx512_bf16", "amx_bf16"))


class SampledGpus(Protocol):
    """GPUs that a driver knows and can be asked about, such as `Gpus`."""

    def sample(self) -> tuple[Gpu, ...]:
        """How each of them is now."""
        ...


def choose_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA where there is one. Raises BadInput for `cuda` without one, and for a
    GPU that is too old: before anything is loaded."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is found"
        raise BadInput(f"device='cuda' is not accepted: {reason}; `kvscope-engine doctor` says what is missing")
    if not has_cuda or name == "cpu":
        return torch.device("cpu")
    if refusal := too_old():
        raise BadInput(f"device={name!r} is not accepted: {refusal}; --device cpu runs on the CPU")
    return torch.device("cuda")


def too_old() -> str:
    """Why the GPU that torch would use cannot run the kernels; empty: it can."""
    capability = torch.cuda.get_device_capability()
    if capability >= MIN_CAPABILITY:
        return ""
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    return "{} has compute capability {}.{}, and at least {}.{} is needed".format(name, *capability, *MIN_CAPABILITY)


def unused_gpu(gpus: SampledGpus | None = None) -> str:
    """Which NVIDIA GPU is there that torch cannot use, why, and what mends it, on one line; empty: none is.

    One that `CUDA_VISIBLE_DEVICES` hides is not meant to be used.
    """
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES", "-") in ("", "-1"):
        return ""
    there = [gpu.name for gpu in (gpus or Gpus()).sample() if not gpu.fault]
    if not there:
        return ""
    return f"{', '.join(there)} cannot be used: {_why_unusable()}"


def device_notes(wanted: str, device: torch.device, gpus: SampledGpus | None = None) -> list[str]:
    """What a person should know of the device that `auto` came to."""
    unused = unused_gpu(gpus) if wanted == "auto" and device.type == "cpu" else ""
    return [f"running on the CPU: {unused} (--device cpu if this is intended)"] if unused else []


def gpu_uuids(count: int) -> tuple[str, ...]:
    """Of the GPUs of `count` ranks, as `DeviceInfo.uuids` has them; without those that torch does not tell."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    found = []
    for rank in range(count):
        named = visible[rank] if rank < len(visible) else ""
        is_instance = named.startswith("MIG-") and len(named) >= _MIG_UUID
        found.append(named if is_instance else str(getattr(torch.cuda.get_device_properties(rank), "uuid", "")))
    return tuple(bare_uuid(uuid) for uuid in found if uuid)


def gpu_uuid(device: torch.device) -> str:
    """Of one GPU; empty where torch does not tell."""
    count = (device.index or 0) + 1
    uuids = gpu_uuids(count)
    return uuids[-1] if len(uuids) == count else ""


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


def _why_unusable() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA; install one that is"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # torch says what CUDA says, of whatever kind
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
    else:
        reason = "no CUDA device is found"
    major = int(torch.version.cuda.partition(".")[0])
    driver = f" {_DRIVERS[major]} or newer" if major in _DRIVERS else ""
    return f"{reason}; CUDA {torch.version.cuda} of this torch needs an NVIDIA driver{driver}"


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    for line in lines_of(cpuinfo):
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _available_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    for line in lines_of(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
