"""Everything a person chose, as one value. Knows no file and no Qt.

A field never changes its meaning or its type; a new one has a default. What Qt packs for each window (where it stands,
where its docks are) is not here but in the INI file beside, see `setting_names`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvscope_app.settings.layout_value import WindowLayout
from kvscope_telemetry.alarms.rules import DEFAULT_RULES, Rule

ZOOM_STEPS: Final = (50, 67, 80, 90, 100, 110, 125, 150, 175, 200, 250, 300)
"""Per cent."""
MINUTES: Final = (1, 10, 24 * 60)
"""Least, usual and most."""
MEGABYTES: Final = (16, 512, 65_536)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One value for all windows of all processes."""

    theme: Literal["auto", "dark", "light"] = "auto"
    palette: Literal["usual", "safe"] = "usual"
    """`safe`: colours that colour-blind eyes tell apart."""
    zoom_percent: Annotated[int, msgspec.Meta(ge=50, le=300)] = 100
    """Of all text and what is measured by it."""
    shortcuts: dict[str, tuple[str, ...]] = {}
    """By the name of the action, where they are not its own; portable text, none: no key."""
    layouts: dict[str, WindowLayout] = {}
    """By the name the person gave."""
    timeline_minutes: Annotated[int, msgspec.Meta(ge=MINUTES[0], le=MINUTES[2])] = MINUTES[1]
    """How much of the past a live session keeps on the disk, at most."""
    timeline_megabytes: Annotated[int, msgspec.Meta(ge=MEGABYTES[0], le=MEGABYTES[2])] = MEGABYTES[1]
    recording_folder: str = ""
    """Where the last recording went; empty: where the person's documents are."""
    listed_folder: str = ""
    """Folder whose recordings the window Recordings lists; empty: `recording_folder`."""
    recent_recordings: tuple[str, ...] = ()
    """Absolute paths of the recordings opened or made last, newest first."""
    record_texts: bool | None = None
    """Whether texts of blocks are recorded; None: the person was not asked yet."""
    color_mode: str = "state"
    """What the colours of the page map mean at first, by name (`page_map.color_modes`); an unknown one is `state`."""
    flashes: bool = True
    """Whether cells light up that change."""
    request_filter: str = ""
    """Which requests the table shows; empty: all."""
    request_columns: dict[str, Annotated[int, msgspec.Meta(ge=0, le=4000)]] = {}
    """Widths by title, in pixels at 100 %, where a person changed them."""
    event_kinds: tuple[str, ...] = ()
    """Which the events dock shows; none: all."""
    alarm_rules: tuple[Rule, ...] = DEFAULT_RULES
    """When alarms ring, in the order in which they are listed."""
    alarm_webhook: str = ""
    """Where alarms are posted; empty: nowhere."""
