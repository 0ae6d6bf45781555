"""Actions that select the colour mode of page maps, with the same shortcuts in an engine's window and in a
comparison."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.views.page_map.color_modes import COLOR_MODES, ColorMode


def color_actions(
    group: str,
    set_mode: Callable[[ColorMode], object],
    current_mode: Callable[[], ColorMode],
    why_not: Callable[[ColorMode], str] | None = None,
) -> list[ActionSpec]:
    """Return one action per colour mode, with the mode's number (counted from 1) as shortcut; the current mode's action
    is checked.
    """
    return [
        ActionSpec(
            f"color_{mode}",
            f"Colour by {mode}",
            group,
            partial(set_mode, mode),
            (str(number),),
            checkable=True,
            exclusive="color",
            why_not=None if why_not is None else partial(why_not, mode),
            checked=partial(lambda mode: current_mode() == mode, mode),
        )
        for number, mode in enumerate(COLOR_MODES, start=1)
    ]
