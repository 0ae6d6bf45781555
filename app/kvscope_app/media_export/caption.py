"""Caption below a picture: model, time, and time range."""

from __future__ import annotations

from datetime import datetime

from kvscope_app.session.session import Session
from kvscope_app.ui.model_name import model_name


def caption_of(session: Session, title: str, range_s: tuple[float, float] | None = None) -> str:
    """Return a caption such as `SmolLM2-135M-Instruct · Page map · 2026-11-22 10:11:43 UTC · 30.0 s`.

    Args:
        session: Session whose model and time are named.
        title: Title of the view.
        range_s: Seconds from the recording's start to name instead of the moment that is shown.
    """
    timeline = session.timeline
    origin_ns = timeline.origin_ns
    parts = [model_name(session.mirror.hello), title, _clock(timeline.cursor_ns)]
    if range_s is not None:
        parts.append(f"{range_s[0]:.1f} s to {range_s[1]:.1f} s")
    elif origin_ns is not None and timeline.is_file:
        parts.append(f"{(timeline.cursor_ns - origin_ns) / 1e9:.1f} s")
    return "  ·  ".join(part for part in parts if part)


def _clock(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
