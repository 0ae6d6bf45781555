"""Actions to search for blocks, requests or text, and to open the inspector."""

from __future__ import annotations

from functools import partial

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.views.inspector.find_sheet import FindSheet
from kvscope_app.views.inspector.finder import Finder
from kvscope_app.window.window_body import WindowBody


def inspector_actions(window: WindowBody, group: str) -> list[ActionSpec]:
    finder = Finder(window.session, window)
    inspect = partial(window.focus_view, "inspector")
    window.page_map.inspect_requested.connect(inspect)
    window.session.chat_turns.show_requested.connect(lambda _: window.focus_view("console"))

    def find() -> None:
        FindSheet(window, finder).show_above()

    return [
        ActionSpec("find", "Find a block, request or text…", group, find, ("Ctrl+F",), "find"),
        ActionSpec("inspect", "Inspect selection", group, inspect, ("Ctrl+I",), "inspect"),
    ]
