"""Part of a device's memory, used by the breakdown and its charts. Imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Part of a device's memory. `color` is the name of a theme colour or a key of the view's series."""

    key: str
    label: str
    num_bytes: int | None
    color: str
    meaning: str
