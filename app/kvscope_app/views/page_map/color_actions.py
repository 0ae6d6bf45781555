"""What page maps are coloured by, as actions: the same keys in a window of one engine and in a comparison."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvscope_app.views.page_map.color_modes import COLOR_MODES, ColorMode
from kvscope_app.window.actions import ActionSpec


def color_actions(group: str, set_mode: Callable[[ColorMode], object]) -> list[ActionSpec]:
    """One a mode, with its number as its key; one of them is checked."""
    return [
        ActionSpec(
            f"color_{mode}",
            f"Colour by {mode}",
            group,
            partial(set_mode, mode),
            (str(number),),
            checkable=True,
            exclusive="color",
        )
        for number, mode in enumerate(COLOR_MODES, start=1)
    ]
