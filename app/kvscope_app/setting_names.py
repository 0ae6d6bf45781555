"""Keys of the INI file in the user's configuration folder, and the layout version. Performs no I/O.

The file has the state that Qt packs for each window, and data of the views. The user's choices are in the JSON file
next to it instead (`settings.settings.Settings`). The meaning of a key never changes: another format gets another key.
"""

from __future__ import annotations

from typing import Final

RECORD_TEXTS: Final = "recording/texts"
"""Whether recordings and live history include prompts and answers: `yes` or `no`; absent until the user was asked."""
PICTURE_SCALE: Final = "picture/scale"
"""Pixels of an exported picture per screen pixel: 1, 2 or 3."""
PICTURE_THEME: Final = "picture/theme"
"""Theme of exported pictures: `dark`, `light` or `as shown`."""
PICTURE_CAPTION: Final = "picture/caption"
"""Whether exported pictures have a caption: `true` or `false`."""
THROUGHPUT_RANGE: Final = "throughput/range"
MEMORY_RANGE: Final = "memory/range"
DEVICES_RANGE: Final = "devices/range"
"""Text of the selected range button in the devices view: one of `time_bar.RANGES_S`."""
ROOFLINE_RANGE: Final = "roofline/range"
REQUEST_GOALS: Final = "requests/goals"
"""Latency goals in milliseconds, such as `ttft:200 tpot:50` (`kvscope_telemetry.slo`)."""
LOAD: Final = "console/load"
"""Settings in the load panel, as a JSON object (`load_generator.load_settings.LoadSettings`)."""
PREFIX_FILTER: Final = "prefixes/filter"
PREFIX_ORDER: Final = "prefixes/order"
"""Sort column and direction of the prefix tree, such as `With_below descending`."""
QUERY_SQL: Final = "query/sql"
"""Text in the editor of the query view."""
LAYOUT_VERSION: Final = 3
"""Version of a window's dock layout. Saved layouts of other versions are ignored."""


def window_group(kind: str, slot: int) -> str:
    """Return the settings group of a window: `kind` for slot 1, otherwise with the slot number, such as `window-2`."""
    return kind if slot == 1 else f"{kind}-{slot}"


def geometry_name(group: str) -> str:
    return f"{group}/geometry"


def splitter_name(group: str, name: str) -> str:
    return f"{group}/splitter-{name}"


def layout_name(group: str) -> str:
    """Return the settings key of the dock layout, which Qt packs with version `LAYOUT_VERSION`."""
    return f"{group}/state"


def lengths_name(group: str) -> str:
    """Return the settings key of the docks' lengths in pixels, by dock name, and of the window size that
    belongs to them.
    """
    return f"{group}/lengths"
