"""Text and theme colour of each source state, and the notice that no history is recorded. Imports no Qt."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.source import SourceState

STATE_TEXTS: Final = {
    SourceState.CONNECTING: "Connecting",
    SourceState.LOADING: "Starting",
    SourceState.LIVE: "Live",
    SourceState.PAUSED: "Engine paused",
    SourceState.REFUSED: "Access denied",
    SourceState.STUCK: "Stuck",
    SourceState.STALE: "No signal",
    SourceState.ENDED: "Stopped",
    SourceState.PLAYBACK: "Playback",
}
STATE_COLORS: Final = {
    SourceState.CONNECTING: "muted",
    SourceState.LOADING: "accent",
    SourceState.LIVE: "good",
    SourceState.PAUSED: "warn",
    SourceState.REFUSED: "bad",
    SourceState.STUCK: "warn",
    SourceState.STALE: "warn",
    SourceState.ENDED: "bad",
    SourceState.PLAYBACK: "accent",
}
HISTORY_RESUMED: Final = "History is being recorded again"


def history_failure_text(failure: str, *, has_some: bool) -> str:
    """Return the notice that history is not recorded. `has_some` says whether earlier history is available."""
    since = " from here on" if has_some else ""
    return f"History is not being recorded{since}: {failure}"
