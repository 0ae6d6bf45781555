"""What can be done in a window that plays a recording."""

from __future__ import annotations

from functools import partial
from typing import Final

from kvscope_app.playback.playback import BACK_S, change_speed, jump_by, toggle
from kvscope_app.session.session import Player
from kvscope_app.window.actions import ActionSpec

PLAYBACK: Final = "Playback"


def playback_actions(player: Player) -> list[ActionSpec]:
    """Play, jump, faster and slower."""
    back = f"{BACK_S:.0f} s"
    return [
        ActionSpec("play", "Play", PLAYBACK, partial(toggle, player), ("Space",), "play", yields=True),
        ActionSpec("to_start", "To the start", PLAYBACK, partial(player.seek, 0.0), ("Home",), "to-start", yields=True),
        ActionSpec("to_end", "To the end", PLAYBACK, partial(_to_end, player), ("End",), "to-end", yields=True),
        ActionSpec("back", f"Back {back}", PLAYBACK, partial(jump_by, player, -BACK_S), ("Ctrl+Left",)),
        ActionSpec("forward", f"Forward {back}", PLAYBACK, partial(jump_by, player, BACK_S), ("Ctrl+Right",)),
        ActionSpec("slower", "Slower", PLAYBACK, partial(change_speed, player, -1), ("[",)),
        ActionSpec("faster", "Faster", PLAYBACK, partial(change_speed, player, 1), ("]",)),
    ]


def _to_end(player: Player) -> None:
    player.seek(player.duration)
