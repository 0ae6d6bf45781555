"""The actions of the main window and its menus.

Features return their actions, and this module lists them in menu order; see
`docs/internals/decisions/0028-the-window-lists-its-features.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from PySide6.QtGui import QAction
from PySide6.QtWidgets import QApplication, QDockWidget

from kvscope_app.actions.action_registry import Actions, ActionSpec
from kvscope_app.actions.command_palette import CommandPalette
from kvscope_app.actions.shortcut_dialog import shortcut_dialog
from kvscope_app.actions.shortcut_editor import ShortcutEditor
from kvscope_app.alarms.bookmark_actions import bookmark_actions, clear_loop_or_selection
from kvscope_app.compare.comparison_opener import ask_other
from kvscope_app.debugger.debug_actions import DEBUG, debug_actions
from kvscope_app.debugger.permission import FOR_OPERATORS
from kvscope_app.debugger.selection_menus import add_selection_menus
from kvscope_app.media_export.picture_actions import picture_actions
from kvscope_app.planning.plan_dialog import PlanDialog
from kvscope_app.playback.playback_actions import TIME, EventJumps, event_kind_actions, playback_actions
from kvscope_app.recent_recordings.open_file import ask_file
from kvscope_app.recent_recordings.recent_menu import RecentMenu
from kvscope_app.recent_recordings.recordings_actions import recordings_actions
from kvscope_app.recording.export_actions import export_actions
from kvscope_app.recording.recording_actions import recording_actions
from kvscope_app.ui.focus import zoom_focused
from kvscope_app.ui.number_text import plural
from kvscope_app.ui.theming.theme_manager import CHOICES, PALETTES
from kvscope_app.views.console.console_actions import console_actions
from kvscope_app.views.docks import DOCKS
from kvscope_app.views.page_map.color_actions import color_actions
from kvscope_app.window.dialogs.attach_dialog import AttachDialog
from kvscope_app.window.dialogs.help_dialogs import about_dialog
from kvscope_app.window.dock_layouts.named_layouts import LAYOUTS, NamedLayouts
from kvscope_app.window.edit_actions import EDIT, edit_actions
from kvscope_app.window.engine_notices import EngineNotices
from kvscope_app.window.inspector_actions import inspector_actions
from kvscope_app.window.window_body import WindowBody
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.source import SourceState

FILE: Final = "File"
ENGINE: Final = "Engine"
VIEW: Final = "View"
MAP: Final = "Page map"
PANELS: Final = "Panels"
THEME: Final = "Theme"
PALETTE: Final = "Colours"
HELP: Final = "Help"
EVENTS: Final = "Step through…"
_LINK_TIP: Final = "Move, play, zoom and select in all windows together"
_NOTICE_MS: Final = 6000
_LAST_DIGIT: Final = 9
QUANTIZATION: Final = "--quantization"
_A8_ON_TEXT: Final = (
    "With 8-bit activations, a CPU decodes faster, especially batches. Answers change: asked for the "
    "capital of France, the default model no longer says Paris."
)
_A8_OFF_TEXT: Final = (
    "With full-precision activations, answers are exactly the model's, but a CPU decodes batches more slowly."
)


def add_actions(window: WindowBody, actions: Actions, notices: EngineNotices) -> None:
    """Add all actions of `window`. Actions that restart kvscope's own engine call methods of `notices`."""
    jumps = EventJumps(window.session.timeline, lambda text: window.statusBar().showMessage(text, _NOTICE_MS))
    time_actions = (
        *playback_actions(window.session.timeline, jumps),
        *event_kind_actions(jumps, EVENTS),
        _link_times_action(window),
    )
    for spec in (
        *_file_actions(window),
        *time_actions,
        *bookmark_actions(window, window.alarms),
        *_engine_actions(window, notices),
        *debug_actions(window, window.debugger),
        *edit_actions(window),
        *inspector_actions(window, VIEW),
        *_view_actions(window),
        *_map_actions(window),
        *_panel_actions(window),
    ):
        actions.add_action(spec, window.docks[spec.focus_dock] if spec.focus_dock else None)
    for spec in (*_text_size_actions(window), *_theme_actions(window), *_palette_actions(window)):
        actions.add_action(spec)
    for spec in _dock_actions(window):
        actions.add_action(spec, window.docks[spec.focus_dock])
    _add_dock_toggles(window, actions)
    for spec in _help_actions(window):
        actions.add_action(spec)
    add_selection_menus(window, actions)

    def show_map_keys() -> None:
        window.page_map.show_keys({spec.name: actions.key_text(spec.name) for spec in actions})

    actions.keys_changed.connect(show_map_keys)
    show_map_keys()


def build_menus(window: WindowBody, actions: Actions, layouts: NamedLayouts) -> None:
    bar = window.menuBar()
    file = bar.addMenu("&File")
    actions.fill(file, FILE)
    if "recordings" in actions:
        file.insertMenu(actions["recordings"], RecentMenu(window, file))
    actions.fill(bar.addMenu("&Edit"), EDIT)
    view = bar.addMenu("&View")
    actions.fill(view, VIEW)
    for group in (MAP, PANELS):
        actions.fill(view.addMenu(group), group)
    layouts.fill(view.addMenu(LAYOUTS))
    for group in (THEME, PALETTE):
        actions.fill(view.addMenu(group), group)
    time = bar.addMenu("&Time")
    actions.fill(time, TIME)
    actions.fill(time.addMenu(EVENTS), EVENTS)
    actions.fill(bar.addMenu("E&ngine"), ENGINE)
    debug = bar.addMenu("&Debug")
    debug.setToolTipsVisible(True)
    actions.fill(debug, DEBUG)
    actions.fill(bar.addMenu("&Help"), HELP)


def _link_times_action(window: WindowBody) -> ActionSpec:
    return ActionSpec(
        "link_times",
        "Link times",
        TIME,
        window.linking.emit,
        ("Ctrl+Shift+L",),
        starts_section=True,
        checkable=True,
        tip=_LINK_TIP,
        enabled=lambda: window.may_link,
        checked=lambda: bool(window.link_text),
    )


def _engine_actions(window: WindowBody, notices: EngineNotices) -> list[ActionSpec]:
    session = window.session
    control = ActionSpec(
        "reset_cache",
        "Reset prefix cache",
        ENGINE,
        partial(window.debugger.control, "reset_prefix_cache"),
        starts_section=True,
        question=lambda: "Reset the prefix cache? Cached prefixes are recomputed when needed.",
        enabled=lambda: session.may_operate,
        why_not=lambda: FOR_OPERATORS if session.is_viewer else "",
    )
    plan = ActionSpec("plan", "Plan memory…", ENGINE, partial(_plan_memory, window), starts_section=True)
    what_if = ActionSpec(
        "what_if_question",
        "Would other settings have helped?",
        ENGINE,
        partial(window.focus_view, "what_if"),
        tip="What if: simulate past requests with more blocks, other limits or another allocator",
    )
    return [*(_own_engine_actions(window, notices) if window.supervisor else []), control, plan, what_if]


def _file_actions(window: WindowBody) -> list[ActionSpec]:
    openers = window.openers
    opening = [
        ActionSpec("open", "Open recording…", FILE, partial(ask_file, window), ("Ctrl+O",), "open"),
        *recordings_actions(window, FILE),
    ]
    attaching = [
        ActionSpec(
            "attach",
            "Attach to an engine…",
            FILE,
            partial(_ask_endpoint, window),
            ("Ctrl+Shift+A",),
            "attach",
            starts_section=True,
        ),
        ActionSpec("fleet", "Fleet…", FILE, partial(_open_fleet, window)),
    ]
    return [
        *(opening if openers.open_recording else []),
        *(attaching if openers.attach else []),
        *recording_actions(window, FILE),
        ActionSpec(
            "compare",
            "Compare with…",
            FILE,
            partial(ask_other, window),
            ("Ctrl+Shift+D",),
            "compare",
            starts_section=True,
        ),
        *export_actions(window, FILE),
        *picture_actions(window, FILE, EDIT),
        ActionSpec(
            "close",
            "Close window",
            FILE,
            window.close,
            ("Ctrl+W",),
            starts_section=True,
            question=partial(close_question, window),
        ),
        ActionSpec("quit", "Quit", FILE, QApplication.closeAllWindows, ("Ctrl+Q",), question=_quit_question),
    ]


def _own_engine_actions(window: WindowBody, notices: EngineNotices) -> list[ActionSpec]:
    restart_question = partial(_restart_question, window)
    return [
        ActionSpec(
            "restart",
            "Restart engine",
            ENGINE,
            notices.restart,
            ("Ctrl+Shift+R",),
            "restart",
            question=restart_question,
        ),
        ActionSpec(
            "activations_8_bits",
            "Round activations to 8 bits…",
            ENGINE,
            partial(notices.restart_with, QUANTIZATION, "a8"),
            question=lambda: f"{_A8_ON_TEXT} {restart_question()}".rstrip(),
            enabled=lambda: _rounds_activations(window) is False,
        ),
        ActionSpec(
            "activations_as_they_are",
            "Keep full-precision activations…",
            ENGINE,
            partial(notices.restart_with, QUANTIZATION, "auto"),
            question=lambda: f"{_A8_OFF_TEXT} {restart_question()}".rstrip(),
            enabled=lambda: _rounds_activations(window) is True,
        ),
        ActionSpec("log", "Show engine log", ENGINE, notices.show_log, ("Ctrl+Shift+G",), "log"),
    ]


def _rounds_activations(window: WindowBody) -> bool | None:
    """Whether activations are quantized to 8 bits; None if unknown, or if the engine does not run on a CPU."""
    hello = window.session.live_mirror.hello
    return None if hello is None or hello.device.kind != "cpu" else hello.model.quantization.endswith("-a8")


def _plan_memory(window: WindowBody) -> None:
    hello = window.session.mirror.hello
    PlanDialog(window, window.themes.theme, "default" if hello is None else hello.model.name, window.plans).show()


def _open_fleet(window: WindowBody) -> None:
    if window.openers.open_fleet is not None:
        window.openers.open_fleet()


def _view_actions(window: WindowBody) -> list[ActionSpec]:
    zoom = partial(zoom_focused, window)
    tip = "{}: the timeline, a chart or the fragmentation map that has the focus, else the page map"
    return [
        ActionSpec(
            "zoom_in",
            "Zoom in",
            VIEW,
            partial(zoom, 1),
            ("+", "="),
            "zoom-in",
            starts_section=True,
            tip=tip.format("Zoom in"),
        ),
        ActionSpec("zoom_out", "Zoom out", VIEW, partial(zoom, -1), ("-",), "zoom-out", tip=tip.format("Zoom out")),
        ActionSpec("fit", "Zoom to fit", VIEW, partial(zoom, 0), ("F",), "fit", tip=tip.format("Show all")),
        ActionSpec("clear", "Clear loop/selection", VIEW, partial(_handle_escape, window), ("Esc",)),
    ]


def _handle_escape(window: WindowBody) -> None:
    """Action of the Esc key: dismiss what a view shows temporarily, otherwise clear the playback loop or the
    selection.
    """
    if not any(view.dismiss() for view in list(window.views.values())):
        clear_loop_or_selection(window.session)


def _map_actions(window: WindowBody) -> list[ActionSpec]:
    view = window.page_map
    return [
        *color_actions(MAP, view.set_mode, lambda: view.mode, view.why_not),
        ActionSpec(
            "flash",
            "Flash changed cells",
            MAP,
            partial(_set_flashing, window),
            checkable=True,
            checked=lambda: view.scene.is_flashing,
        ),
        ActionSpec("focus_map", "Focus page map", MAP, view.canvas.setFocus, ("Ctrl+1",), "map", starts_section=True),
    ]


def _set_flashing(window: WindowBody, on: bool) -> None:
    window.page_map.set_flashing(on)
    window.themes.settings.change(flashes=on)


def _panel_actions(window: WindowBody) -> list[ActionSpec]:
    return [
        ActionSpec(
            f"focus_{spec.name}",
            f"Go to {spec.title}",
            PANELS,
            partial(window.focus_view, spec.name),
            (f"Ctrl+{index}",) if index <= _LAST_DIGIT else (),
            spec.icon,
        )
        for index, spec in enumerate(DOCKS, start=2)
    ]


def _theme_actions(window: WindowBody) -> list[ActionSpec]:
    icons = {"auto": "auto", "dark": "moon", "light": "sun"}
    toggle = ActionSpec(
        "theme_toggle", "Switch theme", VIEW, window.themes.toggle, ("Ctrl+Shift+T",), "moon", starts_section=True
    )
    return [
        toggle,
        *(
            ActionSpec(
                f"theme_{choice}",
                {"auto": "System", "dark": "Dark", "light": "Light"}[choice],
                THEME,
                partial(window.themes.choose, choice),
                (),
                icons[choice],
                checkable=True,
                exclusive="theme",
                checked=partial(_is_theme, window, choice),
            )
            for choice in CHOICES
        ),
    ]


def _palette_actions(window: WindowBody) -> list[ActionSpec]:
    texts = {"usual": "Standard palette", "safe": "Colour-blind palette"}
    return [
        ActionSpec(
            f"palette_{name}",
            texts[name],
            PALETTE,
            partial(window.themes.choose_palette, name),
            checkable=True,
            exclusive="palette",
            checked=partial(_is_palette, window, name),
        )
        for name in PALETTES
    ]


def _is_theme(window: WindowBody, choice: str) -> bool:
    return window.themes.choice == choice


def _is_palette(window: WindowBody, name: str) -> bool:
    return window.themes.settings.values.palette == name


def _text_size_actions(window: WindowBody) -> list[ActionSpec]:
    zoom = window.themes.zoom
    return [
        ActionSpec("larger", "Larger text", VIEW, partial(zoom, 1), ("Ctrl+=", "Ctrl++"), starts_section=True),
        ActionSpec("smaller", "Smaller text", VIEW, partial(zoom, -1), ("Ctrl+-",)),
        ActionSpec("usual_size", "Reset text size", VIEW, partial(zoom, 0), ("Ctrl+0",)),
    ]


def _dock_actions(window: WindowBody) -> list[ActionSpec]:
    """Return the actions whose shortcuts apply only while a certain view has the focus. The actions do nothing
    while that view is not loaded.
    """

    def call_view(name: str, view: str) -> Callable[[], object]:
        return lambda: getattr(window.views[view], name)() if view in window.views else None

    return [
        *console_actions(window.views, PANELS),
        ActionSpec(
            "segments",
            "PyTorch memory segments…",
            PANELS,
            call_view("open_segments", "memory"),
            starts_section=True,
            focus_dock="memory",
        ),
    ]


def _help_actions(window: WindowBody) -> list[ActionSpec]:
    return [
        ActionSpec("palette", "Command palette…", HELP, partial(_open_palette, window), ("Ctrl+Shift+P",), "palette"),
        ActionSpec("shortcuts", "Keyboard shortcuts", HELP, partial(_open_shortcuts, window), ("F1", "?"), "keyboard"),
        ActionSpec("remap", "Change shortcuts…", HELP, partial(_open_editor, window), (), "keyboard"),
        ActionSpec(
            "about", "About kvscope", HELP, lambda: about_dialog(window).show(), (), "help", starts_section=True
        ),
    ]


def _add_dock_toggles(window: WindowBody, actions: Actions) -> None:
    for index, (name, dock) in enumerate(window.docks.items()):
        toggle = dock.toggleViewAction()
        text = f"Show {dock.windowTitle().lower()}"
        spec = ActionSpec(f"toggle_{name}", text, PANELS, toggle.trigger, starts_section=index == 0)
        toggle.setText(spec.text)
        toggle.triggered.connect(partial(_raise_if_shown, dock))
        actions.register(spec, toggle)


def _raise_if_shown(dock: QDockWidget) -> None:
    """Raise a dock that was opened, in case it is behind other tabs."""
    if not dock.isHidden():
        dock.raise_()


def entries(window: WindowBody) -> list[tuple[str, QAction]]:
    """Return (group, action) for each action, for the command palette and the shortcut dialog."""
    actions = window.actions_by_name
    return [(spec.group, actions[spec.name]) for spec in actions]


def _open_palette(window: WindowBody) -> None:
    CommandPalette(window).open_with(entries(window))


def _open_shortcuts(window: WindowBody) -> None:
    shortcut_dialog(window, entries(window), partial(_open_editor, window)).show()


def _open_editor(window: WindowBody) -> None:
    accent = window.themes.theme.color("accent")
    ShortcutEditor(window, window.actions_by_name, window.themes.settings, accent).show()


def close_question(window: WindowBody) -> str:
    """Return the question to ask before `window` closes, or "" unless the window's own engine has unfinished
    requests.
    """
    return _stop_question([window])


def _quit_question() -> str:
    return _stop_question([each for each in QApplication.topLevelWidgets() if isinstance(each, WindowBody)])


def _stop_question(windows: list[WindowBody]) -> str:
    sessions = [
        window.session
        for window in windows
        if window.supervisor is not None and window.session.status.state is not SourceState.ENDED
    ]
    unfinished = sum(int((each.live_mirror.requests.state != RequestState.FINISHED).sum()) for each in sessions)
    return f"Stop the engine and its {plural(unfinished, 'unfinished request')}?" if unfinished else ""


def _restart_question(window: WindowBody) -> str:
    """Return the question to ask before the engine is restarted, or "" if no engine runs."""
    if window.session.status.state in (SourceState.ENDED, SourceState.CONNECTING):
        return ""
    running = int((window.session.live_mirror.requests.state == RequestState.RUNNING).sum())
    consequence = f" This stops {plural(running, 'running request')} and" if running else " It"
    return f"Restart the engine?{consequence} clears its cache."


def _ask_endpoint(window: WindowBody) -> None:
    if window.openers.attach is not None:
        AttachDialog(window, window.openers.attach).show()
