"""One part of a device's memory. No Qt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One part of the device's memory. `color` names a colour of the theme."""

    key: str
    label: str
    num_bytes: int | None
    color: str
    meaning: str
