"""Actions of the console. Imports nothing of the console, which is loaded after the window is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.views.base import View

CONSOLE: Final = "console"
"""Name of the console's dock."""


def console_actions(views: Mapping[str, View], group: str) -> list[ActionSpec]:
    """Return the actions, in menu order. They do nothing while the console is not loaded."""

    def on_view(name: str, *arguments: object) -> Callable[[], object]:
        return lambda: getattr(views[CONSOLE], name)(*arguments) if CONSOLE in views else None

    command = partial(on_view, "run_command")

    spec = partial(ActionSpec, group=group, focus_dock=CONSOLE)
    return [
        spec(
            name="new_chat",
            text="New conversation",
            run=on_view("new_conversation"),
            shortcuts=("Ctrl+N",),
            starts_section=True,
        ),
        spec(name="search_chats", text="Search conversations", run=command("search"), shortcuts=("Ctrl+Shift+F",)),
        spec(name="next_chat", text="Next conversation", run=command("show_next"), shortcuts=("Ctrl+PgDown",)),
        spec(
            name="previous_chat", text="Previous conversation", run=command("show_previous"), shortcuts=("Ctrl+PgUp",)
        ),
        spec(name="rename_chat", text="Rename conversation", run=on_view("rename"), shortcuts=("F2",)),
        spec(name="delete_chat", text="Delete conversation", run=on_view("delete")),
        spec(name="stop_answer", text="Stop answer", run=command("stop"), tip="Stop answer (Esc in the console)"),
        spec(name="copy_answer", text="Copy last answer", run=command("copy_answer"), shortcuts=("Ctrl+Shift+K",)),
        spec(
            name="regenerate_answer",
            text="Regenerate last answer",
            run=command("regenerate"),
            shortcuts=("Ctrl+Shift+N",),
        ),
        spec(name="attach_text", text="Attach text files…", run=command("attach_files")),
        spec(name="export_chat", text="Export conversation…", run=command("export")),
        spec(name="export_chats", text="Export all conversations…", run=command("export_all")),
        spec(name="import_chats", text="Import conversations…", run=command("import_file")),
    ]
