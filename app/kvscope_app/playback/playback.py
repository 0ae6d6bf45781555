"""What a person does with a recording's time: play, pause, jump, faster, slower. Knows no widget."""

from __future__ import annotations

from typing import Final

from kvscope_app.session.session import Player

SPEEDS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
BACK_S: Final = 10.0
"""What the keys jump by."""


def toggle(player: Player) -> None:
    """Play, or stand still."""
    if player.is_playing:
        player.pause()
    else:
        player.play()


def jump_by(player: Player, seconds: float) -> None:
    """Forward, or back with a negative number."""
    player.seek(player.position + seconds)


def change_speed(player: Player, steps: int) -> None:
    """To the next of `SPEEDS`, or the one before."""
    nearest = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - player.speed))
    player.set_speed(SPEEDS[max(0, min(nearest + steps, len(SPEEDS) - 1))])


def speed_text(speed: float) -> str:
    """`0.25×`, `16×`."""
    return f"{speed:g}×"


def time_text(seconds: float, longest: float) -> str:
    """`0:07.3`; `1:02:07.3` in a recording of more than an hour. Cut off, so that it never shows more than passed."""
    tenths = int(seconds * 10 + 1e-6)
    minutes, rest = divmod(tenths, 600)
    small = f"{rest // 10:02d}.{rest % 10}"
    if longest < 3600:
        return f"{minutes}:{small}"
    return f"{minutes // 60}:{minutes % 60:02d}:{small}"
