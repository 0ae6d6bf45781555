"""The text and theme colour for each state of a source, and the text for a past that is not kept.

Knows no Qt.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.source import SourceState

STATE_WORDS: Final = {
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
KEPT_AGAIN: Final = "History is being kept again from here"


def not_kept_text(failure: str, *, has_some: bool) -> str:
    """That the past is not kept, with why. `has_some`: what came before is there."""
    since = " from here on" if has_some else ""
    return f"The past is not kept{since}: {failure}"
