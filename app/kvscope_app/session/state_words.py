"""What a person is told of each state of a source, and the theme's colour it is told in. Knows no Qt."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.source import SourceState

STATE_WORDS: Final = {
    SourceState.CONNECTING: "Connecting",
    SourceState.LOADING: "Loading",
    SourceState.LIVE: "Live",
    SourceState.PAUSED: "Engine held",
    SourceState.REFUSED: "Not let in",
    SourceState.STUCK: "Stuck",
    SourceState.STALE: "No word",
    SourceState.ENDED: "Ended",
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
