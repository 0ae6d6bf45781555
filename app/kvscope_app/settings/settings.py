"""All choices of the user as one value. Imports no Qt and accesses no files.

A field never changes its meaning or type; a new field has a default. State that Qt packs for each window (geometry and
dock layout) is in the INI file instead, see `setting_names`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvscope_app.settings.layout_value import WindowLayout
from kvscope_telemetry.alarms.rules import DEFAULT_RULES, Rule

ZOOM_STEPS: Final = (50, 67, 80, 90, 100, 110, 125, 150, 175, 200, 250, 300)
MINUTES: Final = (1, 10, 24 * 60)
"""Minimum, default and maximum of `Settings.timeline_minutes`."""
MEGABYTES: Final = (16, 512, 65_536)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings shared by all windows of all processes."""

    theme: Literal["auto", "dark", "light"] = "auto"
    palette: Literal["usual", "safe"] = "usual"
    """Colour palette. Colour-blind users can distinguish the colours of `safe`."""
    zoom_percent: Annotated[int, msgspec.Meta(ge=50, le=300)] = 100
    """Zoom, in percent, of texts and of lengths that depend on the text size."""
    shortcuts: dict[str, tuple[str, ...]] = {}
    """Changed shortcuts by action name, as portable text. An empty tuple means no shortcut."""
    layouts: dict[str, WindowLayout] = {}
    timeline_minutes: Annotated[int, msgspec.Meta(ge=MINUTES[0], le=MINUTES[2])] = MINUTES[1]
    """Maximum length in minutes of the history that a live session stores on disk."""
    timeline_megabytes: Annotated[int, msgspec.Meta(ge=MEGABYTES[0], le=MEGABYTES[2])] = MEGABYTES[1]
    recording_folder: str = ""
    """Folder of the last recording; empty for the user's documents folder."""
    listed_folder: str = ""
    """Folder listed by the Recordings window; empty for `recording_folder`."""
    recent_recordings: tuple[str, ...] = ()
    """Absolute paths of the recordings opened or made most recently, newest first."""
    record_texts: bool | None = None
    """Not used: the user's decision is stored in the INI file (`setting_names.RECORD_TEXTS`)."""
    color_mode: str = "state"
    """Initial colour mode of the page map (`page_map.color_modes`). Unknown names count as `state`."""
    flashes: bool = True
    request_filter: str = ""
    """Filter of the request table; empty to show all requests."""
    request_columns: dict[str, Annotated[int, msgspec.Meta(ge=0, le=4000)]] = {}
    """Column widths that the user changed, by column title, in pixels at 100 % zoom."""
    event_kinds: tuple[str, ...] = ()
    """Event kinds shown in the events dock; empty for all kinds."""
    alarm_rules: tuple[Rule, ...] = DEFAULT_RULES
    alarm_webhook: str = ""
    """URL to which alarms are posted; empty to post none."""
