"""Reasons for reduced GPU clocks: NVML's bits, their names in messages, and their text for users."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_BITS: Final = {
    0x001: "idle",
    0x002: "application_clocks",
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
REASON_LABELS: Final = {
    "idle": "idle",
    "application_clocks": "clocks set by a user",
    "power_cap": "power limit reached",
    "hw_slowdown": "slowed down by the hardware",
    "sync_boost": "sync boost with other GPUs",
    "sw_thermal": "thermal limit (driver)",
    "hw_thermal": "thermal limit (hardware)",
    "power_brake": "external power brake",
    "display_clocks": "display clocks",
    "board_limit": "board limit",
    "reliability": "voltage limit",
}
HARMLESS: Final = frozenset({"idle", "application_clocks", "display_clocks", "sync_boost"})
"""Throttling reasons that are intended or need no action."""


def names_of(bits: int) -> tuple[str, ...]:
    """Return the names of all set bits. Unknown bits are combined into one hexadecimal number."""
    found = tuple(name for bit, name in _BITS.items() if bits & bit)
    other = bits & ~sum(_BITS)
    return (*found, f"reason {other:#x}") if other else found


def reasons_text(names: Iterable[str]) -> str:
    return ", ".join(REASON_LABELS.get(name, name) for name in names)


def is_slowed(names: Iterable[str]) -> bool:
    return any(name not in HARMLESS for name in names)
