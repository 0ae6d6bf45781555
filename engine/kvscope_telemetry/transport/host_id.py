"""Identifies the current boot of this machine: processes with the same id share the monotonic clock.

An address is not sufficient: a loopback address may be the end of a tunnel to another machine.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """Return a hash of the kernel's boot id; empty if it is unavailable."""
    try:
        boot_id = _BOOT_ID.read_bytes().strip()
    except OSError:
        return ""
    return hashlib.sha256(b"kvscope " + boot_id).hexdigest()[:16]
