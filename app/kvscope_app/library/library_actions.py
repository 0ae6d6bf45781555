"""What a person does with recordings beside playing one: see them all, see the one that comes with kvscope."""

from __future__ import annotations

from functools import partial

from kvscope_app.library.sample import SAMPLE_TEXT, sample_recording
from kvscope_app.window.actions import ActionSpec
from kvscope_app.window.open_file import try_to_open
from kvscope_app.window.window_body import WindowBody


def library_actions(window: WindowBody, group: str) -> list[ActionSpec]:
    """Beside "Open recording…"."""
    return [
        ActionSpec(
            "recordings", "Recordings…", group, partial(open_recordings, window), ("Ctrl+Shift+O",), "recordings"
        ),
        ActionSpec("sample", SAMPLE_TEXT, group, partial(open_sample, window), (), "play"),
    ]


def open_recordings(window: WindowBody) -> None:
    """The sheet of all of them."""
    from kvscope_app.library.recordings_sheet import show_recordings  # most windows need none of it

    show_recordings(window)


def open_sample(window: WindowBody) -> None:
    """In a window of its own, like any file."""
    try_to_open(window, str(sample_recording()))
