"""Text of bookmarks and alarms, the same in every view."""

from __future__ import annotations

from kvscope_app.ui.clock_text import wall_text
from kvscope_telemetry.exports.exported_bookmarks import name_of
from kvscope_telemetry.summaries.bookmark import Bookmark

__all__ = ["mark_text", "name_of"]


def mark_text(mark: Bookmark) -> str:
    """Return a label such as `14:03:27  KV usage high: up to 98.0 %`."""
    return f"{wall_text(mark.time_ns)}  {name_of(mark)}"
