"""Checks which of the programs, devices and files that kvscope uses are present on this machine. Never raises, and
requires none of them.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from kvscope_telemetry.credentials.key_ring import default_keys_folder, read_allow_list
from kvscope_telemetry.devices.gpus import Gpus
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.devices import Gpu

GIB: Final = 1 << 30
MIN_MEMORY_BYTES: Final = 1 * GIB
MIN_DISK_BYTES: Final = 1 * GIB
INSTALL: Final = "pip install 'kvscope[engine]'"
ENGINE_PACKAGES: Final = ("transformers", "tokenizers", "safetensors", "accelerate", "gguf", "tqdm")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check.

    `needed`: whether a failure means that the engine cannot run, not even on a CPU. `mend`: how to fix a failure; "" if
    unknown.
    """

    name: str
    ok: bool
    detail: str
    needed: bool = False
    mend: str = ""


def check_machine() -> list[Check]:
    checks: tuple[Callable[[], Check], ...] = (
        _python,
        _memory,
        _torch,
        _triton,
        _attention,
        *(partial(_package, name) for name in ENGINE_PACKAGES),
        _gpu,
        _gpu_memory,
        _cache_folder,
        _default_model,
        _weights,
        _allow_list,
        _qt,
        _qt_libraries,
        _display,
    )
    return [_run_check(check) for check in checks]


def _run_check(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a failing check must not hide the others
        name = getattr(check, "__name__", "package").strip("_").replace("_", " ")
        return Check(name=name, ok=False, detail=f"cannot be looked at: {error!r:.200}")


def _python() -> Check:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 14)
    detail = f"{platform.python_version()} at {sys.executable}"
    mend = "install Python 3.11 to 3.14, then make PYTHON=python3.12 run"
    return Check(name="Python", ok=ok, detail=detail, needed=True, mend=mend)


def _memory() -> Check:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    available = _available_bytes(free)
    detail = f"{_gib(available)} of {_gib(total)} available, {os.cpu_count()} CPUs"
    mend = f"end other programs: the default model needs about {_gib(MIN_MEMORY_BYTES)}"
    return Check(name="memory", ok=available >= MIN_MEMORY_BYTES, detail=detail, needed=True, mend=mend)


def _torch() -> Check:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return Check(name="torch", ok=False, detail=_error_text(error), needed=True, mend=INSTALL)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    trouble = _gpu_trouble()
    usable = trouble or (f"{torch.cuda.device_count()} GPU usable" if torch.cuda.is_available() else "no usable GPU")
    detail = f"{torch.__version__}, {build}, {usable}"
    if trouble:  # not `needed`: the CPU can be used
        mend = "update the NVIDIA driver or torch so that they match; --device cpu runs on the CPU"
        return Check(name="torch", ok=False, detail=detail, mend=mend)
    return Check(name="torch", ok=True, detail=detail, needed=True)


def _gpu_trouble() -> str:
    from kvscope_engine.model.platforms.device import unsupported_gpu_reason, unused_gpu

    torch = importlib.import_module("torch")
    return unsupported_gpu_reason() if torch.cuda.is_available() else unused_gpu()


def _triton() -> Check:
    installed = _version("triton")
    detail = installed or "not installed (needed only on a GPU)"
    return Check(name="Triton", ok=bool(installed), detail=detail, mend="pip install triton")


def _attention() -> Check:
    from kvscope_kernels.third_party_attention.library_choice import installed

    libraries = "; ".join(f"{name}: {version_text}" for name, version_text in installed().items())
    return Check(name="attention", ok=True, detail=f"kvscope's own kernels; for prompts on a GPU also {libraries}")


def _package(name: str) -> Check:
    try:
        importlib.import_module(name)
    except Exception as error:
        return Check(name=name, ok=False, detail=_error_text(error), needed=True, mend=INSTALL)
    return Check(name=name, ok=True, detail=_version(name) or "unknown version", needed=True)


def _gpu() -> Check:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        detail = "no NVIDIA driver (nvidia-smi not found): the engine runs on the CPU"
        return Check(name="GPU", ok=False, detail=detail)
    result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    if result.returncode or not lines:
        detail = f"nvidia-smi fails: {(result.stdout + result.stderr).strip().splitlines()[:1]}"
        return Check(name="GPU", ok=False, detail=detail, mend="reinstall or restart the NVIDIA driver")
    return Check(name="GPU", ok=True, detail="; ".join(lines) + " (name, driver, memory)")


def _gpu_memory() -> Check:
    """Check the memory of every GPU, and of the MIG instances in CUDA_VISIBLE_DEVICES. The result names the processes
    that use it.
    """
    from kvscope_engine.model.device_memory.paging import REMEDY, is_wsl

    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpus = [gpu for gpu in Gpus(used=[name for name in visible if name.startswith("MIG-")]).sample() if not gpu.fault]
    detail = "; ".join(_memory_use_text(gpu) for gpu in gpus) or "no GPU reports its memory"
    if gpus and is_wsl():
        detail += (
            "; this is WSL2: when the GPU's memory is full, parts of it may be moved to host memory, which is slow: "
            f"{REMEDY}"
        )
    return Check(name="GPU memory", ok=bool(gpus), detail=detail)


def _memory_use_text(gpu: Gpu) -> str:
    from kvscope_engine.model.device_memory.gpu_holders import describe_holders, holders_of, is_drawing
    from kvscope_engine.model.device_memory.memory_plan import DESKTOP_BYTES

    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    memory_text = (
        f"{free / GIB:.1f} of {_gib(total)} free" if free is not None and total is not None else ("memory unknown")
    )
    display = (
        (f", drives a display, for which {_gib(DESKTOP_BYTES)} stays free") if is_drawing(gpu.display_active) else ""
    )
    holders = describe_holders(holders_of(gpu))
    return f"{gpu.name}: {memory_text}{display}" + (f", held by {holders}" if holders else "")


def _cache_folder() -> Check:
    from kvscope_engine.cache_folder import cache_folder

    mend = "set KVSCOPE_CACHE to a writable folder with free space"
    try:
        folder = cache_folder()
    except Exception as error:
        return Check(name="cache folder", ok=False, detail=_error_text(error), needed=True, mend=mend)
    free = shutil.disk_usage(folder).free
    ok = os.access(folder, os.W_OK) and free >= MIN_DISK_BYTES
    detail = f"{folder}, {_gib(free)} free{'' if os.access(folder, os.W_OK) else ', not writable'}"
    return Check(name="cache folder", ok=ok, detail=detail, needed=True, mend=mend)


def _default_model() -> Check:
    from kvscope_engine.cache_folder import cache_folder
    from kvscope_engine.model.loader.download.default_model import DEFAULT_GGUF

    path: Path = cache_folder() / "default" / DEFAULT_GGUF
    is_downloaded = path.is_file()
    detail = str(path) if is_downloaded else "not downloaded yet: the first start downloads it (98 MB)"
    return Check(name="default model", ok=is_downloaded, detail=detail, mend="kvscope-engine generate --prompt Hello")


def _weights() -> Check:
    from kvscope_engine.roofline.default_weights import NO_COMPILER, default_weights

    detail, ok = default_weights()
    mend = "sudo apt-get install gcc" if detail == NO_COMPILER else ""
    return Check(name="weights", ok=ok, detail=f"of the default model on the CPU: {detail}", mend=mend)


def _allow_list() -> Check:
    folder = default_keys_folder()
    try:
        entries = read_allow_list(folder)
    except KvscopeError as error:
        mend = "fix the file, or move it away and add each client again with `kvscope-engine keys new NAME`"
        return Check(name="allow-list", ok=False, detail=f"no client is let in over tcp: {error}", mend=mend)
    keys = f"{len(entries)} {'key' if len(entries) == 1 else 'keys'}" if entries else "no keys yet (made when needed)"
    return Check(name="allow-list", ok=True, detail=f"{keys}, in {folder}")


def _qt() -> Check:
    installed = _version("PySide6-Essentials")
    detail = f"PySide6 {installed}" if installed else "not installed (needed only by the desktop)"
    return Check(name="Qt", ok=bool(installed), detail=detail, mend="pip install 'kvscope[app]'")


def _qt_libraries() -> Check:
    listed = resources.files("kvscope_resources").joinpath("qt_libraries.txt").read_text().splitlines()
    packages = dict(line.split() for line in listed)
    missing = [library for library in packages if not _can_load(library)]
    return Check(
        name="Qt libraries",
        ok=not missing,
        detail=f"missing {', '.join(missing)}" if missing else f"all {len(packages)} found",
        mend=f"sudo apt-get install {' '.join(dict.fromkeys(packages[library] for library in missing))}",
    )


def _display() -> Check:
    display = os.environ.get("WAYLAND_DISPLAY") or os.environ.get("DISPLAY")
    detail = display or "none (neither DISPLAY nor WAYLAND_DISPLAY is set): the desktop cannot open a window"
    mend = "xvfb-run kvscope, or run the desktop elsewhere and attach it to this engine"
    return Check(name="display", ok=bool(display), detail=detail, mend=mend)


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _available_bytes(free: int) -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return free


def _error_text(error: Exception) -> str:
    return f"cannot be used: {' '.join(str(error).split())[:200] or type(error).__name__}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
