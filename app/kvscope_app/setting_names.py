"""The names of what is in the INI file of the user's configuration folder, and its versions. Reads and writes none.

What a person chose is not there but in `settings.settings.Settings`, in the JSON file beside. The INI keeps what Qt
packs for each window, and what views remember. A name never changes its meaning: what is kept in another form gets
another name.
"""

from __future__ import annotations

from typing import Final

RECORD_TEXTS: Final = "recording/texts"
"""Whether recordings, and what is kept of a live session, hold prompts and answers: `yes` or `no`, once asked."""
PICTURE_SCALE: Final = "picture/scale"
"""1, 2 or 3."""
PICTURE_THEME: Final = "picture/theme"
"""`dark`, `light` or `as shown`."""
PICTURE_CAPTION: Final = "picture/caption"
"""`true` or `false`."""
THROUGHPUT_RANGE: Final = "throughput/range"
MEMORY_RANGE: Final = "memory/range"
DEVICES_RANGE: Final = "devices/range"
"""The word of the button, one of `time_bar.RANGES_S`."""
ROOFLINE_RANGE: Final = "roofline/range"
REQUEST_GOALS: Final = "requests/goals"
"""`ttft:200 tpot:50`, in milliseconds (`kvscope_telemetry.goals`)."""
LOAD: Final = "console/load"
"""The fields of the load panel, as a JSON object of `load.settings.LoadSettings`."""
PREFIX_FILTER: Final = "prefixes/filter"
PREFIX_ORDER: Final = "prefixes/order"
"""Which rows of the prefix tree, a word of its box, and by which column: `With_below descending`."""
LAYOUT_VERSION: Final = 3
"""Of a window's docks. A saved layout of another version is not restored: the window opens as at the first start."""


def window_group(kind: str, slot: int) -> str:
    """Where a window's geometry and layout are: `window` or `playback` for the first of its kind that is open,
    `window-2` for the second, …"""
    return kind if slot == 1 else f"{kind}-{slot}"


def geometry_name(group: str) -> str:
    """Where the window stands, as Qt packs it."""
    return f"{group}/geometry"


def splitter_name(group: str, name: str) -> str:
    """How two parts of a window share it, as Qt packs it."""
    return f"{group}/splitter-{name}"


def layout_name(group: str) -> str:
    """Where its docks are, as Qt packs it, of `LAYOUT_VERSION`."""
    return f"{group}/state"


def lengths_name(group: str) -> str:
    """How wide, or high, its docks are where it has room for them: whole numbers by their names, and for which size."""
    return f"{group}/lengths"
