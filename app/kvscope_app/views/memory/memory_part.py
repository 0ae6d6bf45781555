"""Part of a device's memory, used by the breakdown and its charts. Imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Part of a device's memory. `color` is a name that the memory view maps to a theme colour
    (`memory_view.part_color`).
    """

    key: str
    label: str
    num_bytes: int | None
    color: str
    meaning: str
