"""Choice of a model's device and dtype at load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

import torch

from kvscope_telemetry.devices.gpus import Gpus, bare_uuid
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.devices import Gpu

MIN_CAPABILITY: Final = (8, 0)
"""Minimum compute capability. On older GPUs, prefill's tiles exceed the shared memory of a multiprocessor."""
_OLDEST_DRIVERS: Final = {11: "450", 12: "525", 13: "580"}
"""Minimum NVIDIA driver version for each major version of CUDA."""
_MIG_UUID_CHARS: Final = 40
BF16_INSTRUCTIONS = frozenset(("avx512_bf16", "amx_bf16"))


class SampledGpus(Protocol):
    """Source of information on the GPUs of this machine, such as `Gpus`."""

    def sample(self) -> tuple[Gpu, ...]: ...


def choose_device(name: str) -> torch.device:
    """Return the device called `name`. `auto` is CUDA if there is a GPU.

    Raises:
        BadInput: `name` is `cuda` and there is no GPU, or the GPU is too old.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is found"
        raise BadInput(f"device='cuda' is not accepted: {reason}; `kvscope-engine doctor` says what is missing")
    if not has_cuda or name == "cpu":
        return torch.device("cpu")
    if refusal := unsupported_gpu_reason():
        raise BadInput(f"device={name!r} is not accepted: {refusal}; --device cpu runs on the CPU")
    return torch.device("cuda")


def unsupported_gpu_reason() -> str:
    """Return why the GPU that torch would use is too old for the kernels; empty if that GPU is supported."""
    capability = torch.cuda.get_device_capability()
    if capability >= MIN_CAPABILITY:
        return ""
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    return "{} has compute capability {}.{}, and at least {}.{} is needed".format(name, *capability, *MIN_CAPABILITY)


def unused_gpu(gpus: SampledGpus | None = None) -> str:
    """Describe the NVIDIA GPUs that torch cannot use, the reason and the remedy, on one line; empty if there are none.

    A GPU hidden by `CUDA_VISIBLE_DEVICES` is hidden on purpose and not reported.
    """
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES", "-") in ("", "-1"):
        return ""
    names = [gpu.name for gpu in (gpus or Gpus()).sample() if not gpu.fault]
    if not names:
        return ""
    return f"{', '.join(names)} cannot be used: {_unusable_reason()}"


def device_notes(requested: str, device: torch.device, gpus: SampledGpus | None = None) -> list[str]:
    """Return messages for the user if `auto` chose the CPU although there is a GPU."""
    unused = unused_gpu(gpus) if requested == "auto" and device.type == "cpu" else ""
    return [f"running on the CPU: {unused} (--device cpu if this is intended)"] if unused else []


def gpu_uuids(count: int) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of `count` ranks, as in `DeviceInfo.uuids`. UUIDs that torch does not report are
    left out.
    """
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    uuids = []
    for rank in range(count):
        visible_name = visible[rank] if rank < len(visible) else ""
        is_instance = visible_name.startswith("MIG-") and len(visible_name) >= _MIG_UUID_CHARS
        uuids.append(visible_name if is_instance else str(getattr(torch.cuda.get_device_properties(rank), "uuid", "")))
    return tuple(bare_uuid(uuid) for uuid in uuids if uuid)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU; empty if torch does not report it."""
    count = (device.index or 0) + 1
    uuids = gpu_uuids(count)
    return uuids[-1] if len(uuids) == count else ""


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`.

    `auto` is bfloat16 if the hardware has instructions for it, else float16 on a GPU and float32 on a CPU.
    """
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype), f"EngineConfig let dtype {name!r} pass"
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_flags() & BF16_INSTRUCTIONS else torch.float32


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that can be allocated on `device` now; a very large number if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _available_host_bytes()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without prefix: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _unusable_reason() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA; install one that is"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # torch passes on CUDA's errors, of many types
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
    else:
        reason = "no CUDA device is found"
    major = int(torch.version.cuda.partition(".")[0])
    driver = f" {_OLDEST_DRIVERS[major]} or newer" if major in _OLDEST_DRIVERS else ""
    return f"{reason}; CUDA {torch.version.cuda} of this torch needs an NVIDIA driver{driver}"


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
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
