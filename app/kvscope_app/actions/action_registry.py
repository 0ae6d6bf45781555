"""One registry of everything a person can do: menus, toolbar, shortcuts, palette and sheets all come from it.

Which keys an action has is the person's choice, else its own; see `keymap.py`.
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
    QWidget,
)

from kvscope_app.actions.keymap import Command, keys_of
from kvscope_app.look.asking import ask
from kvscope_app.look.icons import icon
from kvscope_app.look.theme import Theme
from kvscope_app.settings.settings import Settings
from kvscope_app.settings.settings_keeper import SettingsKeeper

_PLATFORM_KEYS: Final = {
    Qt.Key.Key_Space: (QAbstractButton, QComboBox),
    Qt.Key.Key_Home: (QComboBox,),
    Qt.Key.Key_End: (QComboBox,),
}
"""What every platform lets a widget do with a key while it has the focus. A key means nothing else by focus: a view
that wants one of its own takes one that no action has. Fields for text keep what edits text, as Qt sees to."""


ACTION_NOTE: Final = "Action: "
"""Begins the note (`BaseException.add_note`) with the text of the action in which an error was raised."""


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What an action is called, where it is found, and what it does."""

    name: str
    """Never changes: code and tests find it by this."""
    text: str
    group: str
    """Menu, and heading in the shortcut sheet."""
    run: Callable[..., Any]
    shortcuts: Sequence[str] = ()
    icon: str = ""
    checkable: bool = False
    """`run` is called with whether it is checked now, unless it is `exclusive`."""
    exclusive: str = ""
    """Of the actions with the same word here, one is checked."""
    yields: bool = False
    """Leaves its keys to a focused button or list of choices that means something by them on every platform."""
    tip: str = ""
    within: str = ""
    """Its keys mean this only while the focus is in the dock of this name."""
    question: Callable[[], str] | None = None
    """Asked first, for what cannot be undone; nothing is asked where it is empty."""
    enabled: Callable[[], bool] | None = None
    """Whether it can be done now; None: always."""
    why_not: Callable[[], str] | None = None
    """Why it cannot be done now, which its tooltip says then; empty where nothing speaks against it."""
    checked: Callable[[], bool] | None = None
    text_now: Callable[[], str] | None = None
    """What it is called now, where that changes."""


class YieldingAction(QAction):
    """Of keys that press or turn a focused control on every platform: that comes first."""

    def event(self, event: QEvent) -> bool:
        focus = QApplication.focusWidget()
        if isinstance(event, QShortcutEvent) and focus is not None:
            pressed = event.key()[0]  # type: ignore[index]  # PySide's stubs leave it out
            if not isinstance(focus, _PLATFORM_KEYS.get(pressed.key(), ())):
                return super().event(event)
            for kind in (QEvent.Type.KeyPress, QEvent.Type.KeyRelease):
                focus.event(QKeyEvent(kind, pressed.key(), pressed.keyboardModifiers()))  # past the shortcuts
            return True
        return super().event(event)


class Actions(QObject):
    """The actions of one window, by name, in the order they were added. `choices`: which keys the person chose."""

    keys_changed = Signal()

    def __init__(self, parent: QWidget, choices: SettingsKeeper) -> None:
        super().__init__(parent)
        self._parent = parent
        self._choices = choices
        self._actions: dict[str, QAction] = {}
        self._specs: dict[str, ActionSpec] = {}
        self._exclusive: dict[str, QActionGroup] = {}
        choices.changed.connect(self._on_settings)

    def __getitem__(self, name: str) -> QAction:
        return self._actions[name]

    def __contains__(self, name: str) -> bool:
        return name in self._actions

    def __iter__(self) -> Iterator[ActionSpec]:
        return iter(self._specs.values())

    def add_action(self, spec: ActionSpec, place: QWidget | None = None) -> QAction:
        """Make the action and give it to the window, so that its shortcuts work; to `place` where it is `within`."""
        assert spec.name not in self._specs, f"two actions are named {spec.name}"
        kind = YieldingAction if spec.yields else QAction
        action = kind(spec.text, self._parent)
        action.setObjectName(spec.name)
        action.setCheckable(spec.checkable)
        if spec.exclusive:
            self._group(spec.exclusive).addAction(action)
        if spec.checkable and not spec.exclusive:
            action.triggered.connect(lambda checked: self._named(spec, partial(spec.run, checked)))
        else:
            action.triggered.connect(lambda: self._named(spec, partial(self._run, spec)))
        self.register(spec, action)
        if place is not None:
            action.setShortcutContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
        (place or self._parent).addAction(action)
        self._refresh(spec)
        return action

    def register(self, spec: ActionSpec, action: QAction) -> None:
        """Take an action that Qt made (a dock's own) into the registry."""
        self._specs[spec.name], self._actions[spec.name] = spec, action
        self._give_keys(spec)

    def remove(self, name: str) -> None:
        """It can be done no longer."""
        self._specs.pop(name)
        action = self._actions.pop(name)
        self._parent.removeAction(action)
        action.deleteLater()

    def in_group(self, group: str) -> list[ActionSpec]:
        """The actions of one menu."""
        return [spec for spec in self if spec.group == group]

    def commands(self) -> list[Command]:
        """All of them, as the keymap sees them."""
        return [
            Command(spec.name, self._actions[spec.name].text().replace("&", ""), tuple(spec.shortcuts), spec.within)
            for spec in self
        ]

    def key_text(self, name: str) -> str:
        """The first of its keys as the system writes it; empty: none."""
        return self._actions[name].shortcut().toString(QKeySequence.SequenceFormat.NativeText)

    def refresh(self, *_: object) -> None:
        """Something changed on which it may depend what can be done, what is checked, and what things are called."""
        for spec in self:
            self._refresh(spec)

    def apply_theme(self, theme: Theme) -> None:
        """Draw the icons in the colours of `theme`."""
        for spec in self:
            if spec.icon:
                self._actions[spec.name].setIcon(icon(spec.icon, theme.text, theme.border))

    def _named(self, spec: ActionSpec, run: Callable[[], object]) -> None:
        """Call `run`; an error that leaves it carries the action's text, so that the error strip can name it."""
        try:
            run()
        except Exception as error:
            error.add_note(f"{ACTION_NOTE}{self._actions[spec.name].text().replace('&', '').rstrip('…')}")
            raise

    def _run(self, spec: ActionSpec) -> None:
        question = "" if spec.question is None else spec.question()
        if question:
            ask(self._parent, question, spec.text.rstrip("…"), spec.run)
        else:
            spec.run()

    def _on_settings(self, before: Settings) -> None:
        if before.shortcuts != self._choices.values.shortcuts:
            for spec in self:
                self._give_keys(spec)
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

    def _give_keys(self, spec: ActionSpec) -> None:
        action = self._actions[spec.name]
        keys = keys_of(spec.name, tuple(spec.shortcuts), self._choices.values.shortcuts)
        action.setShortcuts([QKeySequence(text) for text in keys])
        action.setToolTip(self._tip(spec))

    def _tip(self, spec: ActionSpec) -> str:
        tip, first = spec.tip or spec.text.rstrip("…"), self.key_text(spec.name)
        return f"{tip} ({first})" if first else tip

    def _group(self, name: str) -> QActionGroup:
        if name not in self._exclusive:
            self._exclusive[name] = QActionGroup(self._parent)
        return self._exclusive[name]
