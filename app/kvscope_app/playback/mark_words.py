"""Bookmarks and alarms in words, on every view the same."""

from __future__ import annotations

from kvscope_app.playback.playback import wall_text
from kvscope_telemetry.alarms.words import title_of
from kvscope_telemetry.summaries.bookmark import Bookmark


def name_of(mark: Bookmark) -> str:
    """What it is about: a person's words, or an alarm and how bad it was."""
    name = "" if mark.is_note else title_of(mark.kind)
    return ": ".join(part for part in (name, mark.text) if part) or "Bookmark"


def mark_text(mark: Bookmark) -> str:
    """`14:03:27  KV usage high: up to 98.0 %`."""
    return f"{wall_text(mark.time_ns)}  {name_of(mark)}"
