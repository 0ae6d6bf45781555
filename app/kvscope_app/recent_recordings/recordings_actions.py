"""Menu entries that list recordings and open the sample recordings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.recent_recordings.open_file import try_to_open
from kvscope_app.session_window import SessionWindow
from kvscope_telemetry.recordings.sample import HYBRID_TEXT, SAMPLE_TEXT, hybrid_recording, sample_recording


def recordings_actions(window: SessionWindow, group: str) -> list[ActionSpec]:
    return [
        ActionSpec(
            "recordings", "Recordings…", group, partial(open_recordings, window), ("Ctrl+Shift+O",), "recordings"
        ),
        ActionSpec("sample", SAMPLE_TEXT, group, partial(open_sample, window, sample_recording), (), "play"),
        ActionSpec("sample_hybrid", HYBRID_TEXT, group, partial(open_sample, window, hybrid_recording), (), "play"),
    ]


def open_recordings(window: SessionWindow) -> None:
    from kvscope_app.recent_recordings.recordings_window import show_recordings  # imported late: rarely used

    show_recordings(window)


def open_sample(window: SessionWindow, sample: Callable[[], Path]) -> None:
    try_to_open(window, str(sample()))
