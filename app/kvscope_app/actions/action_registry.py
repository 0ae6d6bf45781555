"""Registry of all user actions, from which menus, toolbar, shortcuts, palette and dialogs are built.

An action has the shortcuts that the user chose, else its default ones; see `keymap.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtGui import QAction, QActionGroup, QKeyEvent, QKeySequence, QShortcutEvent
from PySide6.QtWidgets import (
    QAbstractButton,
    QApplication,
    QComboBox,
    QMenu,
    QWidget,
)

from kvscope_app.actions.keymap import Command, keys_of
from kvscope_app.settings.settings import Settings
from kvscope_app.settings.settings_store import SettingsStore
from kvscope_app.ui.confirmation import confirm
from kvscope_app.ui.icons import icon
from kvscope_app.ui.theme import Theme

_PLATFORM_KEYS: Final = {
    Qt.Key.Key_Space: (QAbstractButton, QComboBox),
    Qt.Key.Key_Home: (QComboBox,),
    Qt.Key.Key_End: (QComboBox,),
}
"""Classes of Qt widgets that handle a key themselves on every platform while they have the focus, by key.

An action whose `ActionSpec.yields_to_widget` is set leaves these keys to such a widget. All other shortcuts work
regardless of the focus, so a view must use keys that no action has. Qt makes sure that text fields keep their editing
keys.
"""


ACTION_NOTE_PREFIX: Final = "Action: "
"""Start of the note that is added to an exception (`BaseException.add_note`). The text of the action that raised the
exception follows.
"""


@dataclass(frozen=True, slots=True)
class ActionSpec:
    name: str
    text: str
    group: str
    run: Callable[..., Any]
    shortcuts: Sequence[str] = ()
    icon: str = ""
    checkable: bool = False
    """Whether the action has a check state. Unless the action is `exclusive`, `run` is called with the new state."""
    exclusive: str = ""
    """Name of a group of actions of which exactly one is checked; empty if the action is in no group."""
    yields_to_widget: bool = False
    """Whether a focused button or combo box that handles the key itself (`_PLATFORM_KEYS`) takes precedence over the
    shortcut.
    """
    tip: str = ""
    starts_section: bool = False
    """Whether a separator is drawn above the action in its menu."""
    focus_dock: str = ""
    """Name of the dock that must have the keyboard focus for the shortcuts to work, or "" for the whole window."""
    question: Callable[[], str] | None = None
    """Returns a question to ask before an action that cannot be undone. If the text is empty, the action runs without
    asking.
    """
    enabled: Callable[[], bool] | None = None
    why_not: Callable[[], str] | None = None
    """Returns why the action is disabled, shown as its tooltip; empty if the action is enabled."""
    checked: Callable[[], bool] | None = None
    text_now: Callable[[], str] | None = None


class YieldingAction(QAction):
    """Action with a shortcut that is passed to the focused widget if that widget handles the key itself
    (`_PLATFORM_KEYS`).
    """

    def event(self, event: QEvent) -> bool:
        focus = QApplication.focusWidget()
        if isinstance(event, QShortcutEvent) and focus is not None:
            pressed = event.key()[0]  # type: ignore[index]  # PySide's stubs leave it out
            if not isinstance(focus, _PLATFORM_KEYS.get(pressed.key(), ())):
                return super().event(event)
            for kind in (QEvent.Type.KeyPress, QEvent.Type.KeyRelease):
                focus.event(QKeyEvent(kind, pressed.key(), pressed.keyboardModifiers()))  # bypasses shortcuts
            return True
        return super().event(event)


class Actions(QObject):
    """Actions of one window by name, in insertion order. `settings_store` has the user's shortcuts."""

    keys_changed = Signal()

    def __init__(self, parent: QWidget, settings_store: SettingsStore) -> None:
        super().__init__(parent)
        self._parent = parent
        self._settings_store = settings_store
        self._actions: dict[str, QAction] = {}
        self._specs: dict[str, ActionSpec] = {}
        self._exclusive: dict[str, QActionGroup] = {}
        settings_store.changed.connect(self._on_settings)

    def __getitem__(self, name: str) -> QAction:
        return self._actions[name]

    def __contains__(self, name: str) -> bool:
        return name in self._actions

    def __iter__(self) -> Iterator[ActionSpec]:
        return iter(self._specs.values())

    def add_action(self, spec: ActionSpec, owner: QWidget | None = None) -> QAction:
        """Create the action and add it to the window, or to `owner` if its shortcuts apply only there."""
        assert spec.name not in self._specs, f"two actions are named {spec.name}"
        kind = YieldingAction if spec.yields_to_widget else QAction
        action = kind(spec.text, self._parent)
        action.setObjectName(spec.name)
        action.setCheckable(spec.checkable)
        if spec.exclusive:
            self._group(spec.exclusive).addAction(action)
        if spec.checkable and not spec.exclusive:
            action.triggered.connect(lambda checked: self._run_annotated(spec, partial(spec.run, checked)))
        else:
            action.triggered.connect(lambda: self._run_annotated(spec, partial(self._run, spec)))
        self.register(spec, action)
        if owner is not None:
            action.setShortcutContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
        (owner or self._parent).addAction(action)
        self._refresh(spec)
        return action

    def register(self, spec: ActionSpec, action: QAction) -> None:
        """Add an action that Qt created, such as a dock's toggle action, to the registry."""
        self._specs[spec.name], self._actions[spec.name] = spec, action
        self._set_shortcuts(spec)

    def remove(self, name: str) -> None:
        self._specs.pop(name)
        action = self._actions.pop(name)
        self._parent.removeAction(action)
        action.deleteLater()

    def in_group(self, group: str) -> list[ActionSpec]:
        return [spec for spec in self if spec.group == group]

    def fill(self, menu: QMenu, group: str) -> None:
        """Add the actions of `group` to `menu`, with a separator above each one that starts a section."""
        for spec in self.in_group(group):
            if spec.starts_section and not menu.isEmpty():
                menu.addSeparator()
            menu.addAction(self[spec.name])

    def commands(self) -> list[Command]:
        return [
            Command(spec.name, self._actions[spec.name].text().replace("&", ""), tuple(spec.shortcuts), spec.focus_dock)
            for spec in self
        ]

    def key_text(self, name: str) -> str:
        """Return the action's first shortcut in the platform's notation; empty if the action has no shortcut."""
        return self._actions[name].shortcut().toString(QKeySequence.SequenceFormat.NativeText)

    def refresh(self, *_: object) -> None:
        """Update texts, enabled and checked states of all actions. Call when anything that they depend on changes."""
        for spec in self:
            self._refresh(spec)

    def apply_theme(self, theme: Theme) -> None:
        for spec in self:
            if spec.icon:
                self._actions[spec.name].setIcon(icon(spec.icon, theme.text, theme.border))

    def _run_annotated(self, spec: ActionSpec, run: Callable[[], object]) -> None:
        """Call `run`. If it raises an exception, add the action's text to the exception as a note, which the
        error strip shows.
        """
        try:
            run()
        except Exception as error:
            error.add_note(f"{ACTION_NOTE_PREFIX}{self._actions[spec.name].text().replace('&', '').rstrip('…')}")
            raise

    def _run(self, spec: ActionSpec) -> None:
        question = "" if spec.question is None else spec.question()
        if question:
            confirm(self._parent, question, spec.text.rstrip("…"), spec.run)
        else:
            spec.run()

    def _on_settings(self, before: Settings) -> None:
        if before.shortcuts != self._settings_store.values.shortcuts:
            for spec in self:
                self._set_shortcuts(spec)
                self._refresh(spec)
            self.keys_changed.emit()

    def _refresh(self, spec: ActionSpec) -> None:
        action = self._actions[spec.name]
        reason = "" if spec.why_not is None else spec.why_not()
        if spec.enabled is not None or spec.why_not is not None:
            action.setEnabled(not reason and (spec.enabled is None or spec.enabled()))
        if spec.why_not is not None:
            action.setToolTip(reason or self._tip(spec))
        if spec.checked is not None and (spec.checked() or not spec.exclusive):
            action.setChecked(spec.checked())
        if spec.text_now is not None:
            action.setText(spec.text_now())

    def _set_shortcuts(self, spec: ActionSpec) -> None:
        action = self._actions[spec.name]
        keys = keys_of(spec.name, tuple(spec.shortcuts), self._settings_store.values.shortcuts)
        action.setShortcuts([QKeySequence(text) for text in keys])
        action.setToolTip(self._tip(spec))

    def _tip(self, spec: ActionSpec) -> str:
        tip, shortcut = spec.tip or spec.text.rstrip("…"), self.key_text(spec.name)
        return f"{tip} ({shortcut})" if shortcut else tip

    def _group(self, name: str) -> QActionGroup:
        if name not in self._exclusive:
            self._exclusive[name] = QActionGroup(self._parent)
        return self._exclusive[name]
