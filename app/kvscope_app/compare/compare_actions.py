"""Actions of a comparison window except playback: copy, export, colours, zoom and help."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtGui import QAction
from PySide6.QtWidgets import QApplication

from kvscope_app.actions.action_registry import Actions, ActionSpec
from kvscope_app.actions.command_palette import CommandPalette
from kvscope_app.actions.shortcut_dialog import shortcut_dialog
from kvscope_app.actions.shortcut_editor import ShortcutEditor
from kvscope_app.compare.compare_body import CompareBody
from kvscope_app.playback.playback_actions import TIME, EventJumps, event_kind_actions, playback_actions
from kvscope_app.ui.file_dialogs import ask_save
from kvscope_app.ui.focus import zoom_focused
from kvscope_app.views.page_map.color_actions import color_actions
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.exports.comparison.comparison_table import write_comparison_csv
from kvscope_telemetry.exports.new_file import new_file

COMPARISON: Final = "Comparison"
VIEW: Final = "View"
EVENTS: Final = "Step through…"
HELP: Final = "Help"
_NOTICE_MS: Final = 8000


def add_compare_actions(window: CompareBody, actions: Actions) -> None:
    jumps = EventJumps(window.pair, lambda text: window.statusBar().showMessage(text, _NOTICE_MS))
    time = (*playback_actions(window.pair, jumps), *event_kind_actions(jumps, EVENTS))
    for spec in (*_comparison(window), *time, *_view(window), *_help(window, actions)):
        actions.add_action(spec)
    _build_menus(window, actions)


def export_table(window: CompareBody, path: str) -> None:
    """Write the table of key figures as CSV to `path`, with `.csv` appended if missing.

    An existing file is not replaced. The banner reports that and other errors.
    """
    comparison = window.figures.comparison
    if comparison is None:
        return
    target = Path(path if path.endswith(".csv") else f"{path}.csv")
    try:
        with new_file(target) as file:
            write_comparison_csv(comparison, file)
    except KvscopeError as error:
        window.banner.show_message("The table could not be exported", str(error), is_temporary=True)
        return
    window.statusBar().showMessage(f"Exported to {target}", _NOTICE_MS)


def _comparison(window: CompareBody) -> list[ActionSpec]:
    return [
        ActionSpec("copy", "Copy the table", COMPARISON, partial(_copy, window), ("Ctrl+C",)),
        ActionSpec("export_table", "Export the table…", COMPARISON, partial(_ask_path, window), ("Ctrl+E",)),
        ActionSpec("close", "Close window", COMPARISON, window.close, ("Ctrl+W",)),
        ActionSpec("quit", "Quit", COMPARISON, QApplication.closeAllWindows, ("Ctrl+Q",)),
    ]


def _view(window: CompareBody) -> list[ActionSpec]:
    zoom = partial(zoom_focused, window)
    return [
        *color_actions(VIEW, window.set_mode, lambda: window.sides[0].map.mode),
        ActionSpec("zoom_in", "Zoom in", VIEW, partial(zoom, 1), ("+", "="), "zoom-in"),
        ActionSpec("zoom_out", "Zoom out", VIEW, partial(zoom, -1), ("-",), "zoom-out"),
        ActionSpec("fit", "Zoom to fit", VIEW, partial(zoom, 0), ("F",), "fit"),
        ActionSpec("whole_time", "Show the whole timeline", VIEW, window.curves.show_all, ("W",)),
        ActionSpec("theme_toggle", "Switch theme", VIEW, window.themes.toggle, ("Ctrl+Shift+T",), "moon"),
    ]


def _help(window: CompareBody, actions: Actions) -> list[ActionSpec]:
    def entries() -> list[tuple[str, QAction]]:
        return [(spec.group, actions[spec.name]) for spec in actions]

    def edit_shortcuts() -> None:
        themes = window.themes
        ShortcutEditor(window, actions, themes.settings, themes.theme.color("accent")).show()

    return [
        ActionSpec(
            "palette",
            "Command palette…",
            HELP,
            lambda: CommandPalette(window).open_with(entries()),
            ("Ctrl+Shift+P",),
            "palette",
        ),
        ActionSpec(
            "shortcuts",
            "Keyboard shortcuts",
            HELP,
            lambda: shortcut_dialog(window, entries(), edit_shortcuts).show(),
            ("F1", "?"),
            "keyboard",
        ),
    ]


def _build_menus(window: CompareBody, actions: Actions) -> None:
    bar = window.menuBar()
    for title, group in (("&Comparison", COMPARISON), ("&Time", TIME), ("&View", VIEW), ("&Help", HELP)):
        menu = bar.addMenu(title)
        actions.fill(menu, group)
        if group == TIME:
            actions.fill(menu.addMenu(EVENTS), EVENTS)


def _copy(window: CompareBody) -> None:
    window.figures.copy()
    window.statusBar().showMessage("Table copied", _NOTICE_MS)


def _ask_path(window: CompareBody) -> None:
    save = partial(export_table, window)  # existing files are rejected with a message
    ask_save(window, "Export the table", Path("comparison.csv"), "CSV (*.csv)", save, confirms_overwrite=False)
