"""Operations on a timeline (toggle, go to start, change speed) and formatting of its times. Contains no widgets."""

from __future__ import annotations

from typing import Final

from kvscope_app.session.timeline import Timeline

SPEEDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
LONG_JUMP_S: Final = 10.0
SHORT_JUMP_S: Final = 1.0


def toggle(timeline: Timeline) -> None:
    if timeline.is_playing:
        timeline.pause()
    else:
        timeline.play()


def to_start(timeline: Timeline) -> None:
    range_ns = timeline.range_ns
    if range_ns is not None:
        timeline.go_to(range_ns[0])


def change_speed(timeline: Timeline, steps: int) -> None:
    """Change the speed by `steps` entries of `SPEEDS`, faster if positive."""
    nearest = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - timeline.speed))
    timeline.set_speed(SPEEDS[max(0, min(nearest + steps, len(SPEEDS) - 1))])


def speed_text(speed: float) -> str:
    return f"{speed:g}×"


def time_text(seconds: float, longest: float) -> str:
    """Format a position: `0:07.3`, or `1:02:07.3` if `longest` is an hour or more. Truncates to tenths of a second."""
    tenths = max(0, int(seconds * 10 + 1e-6))
    minutes, remainder = divmod(tenths, 600)
    seconds_part = f"{remainder // 10:02d}.{remainder % 10}"
    if longest < 3600:
        return f"{minutes}:{seconds_part}"
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds_part}"
