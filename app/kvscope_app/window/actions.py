"""One registry of everything a person can do: menus, toolbar, shortcuts, palette and sheet all come from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QAction, QActionGroup, QKeyEvent, QKeySequence, QShortcutEvent
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractItemView,
    QAbstractSlider,
    QApplication,
    QComboBox,
    QWidget,
)

from kvscope_app.look.icons import icon
from kvscope_app.look.theme import Theme

_HAVE_KEYS_OF_THEIR_OWN: Final = (QAbstractButton, QAbstractItemView, QAbstractSlider, QComboBox)


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
    """Leaves its keys to a focused widget that means something by them itself."""
    tip: str = ""


_KEYS: Final = {"Space": Qt.Key.Key_Space, "End": Qt.Key.Key_End, "Home": Qt.Key.Key_Home}


class YieldingAction(QAction):
    """Of a key in `_KEYS`, which a focused widget may mean something by: then that comes first.

    Space presses a focused button, End goes to the end of a focused list.
    """

    def event(self, event: QEvent) -> bool:
        focus = QApplication.focusWidget()
        if isinstance(event, QShortcutEvent) and isinstance(focus, _HAVE_KEYS_OF_THEIR_OWN):
            key = _KEYS[event.key().toString()]
            for kind in (QEvent.Type.KeyPress, QEvent.Type.KeyRelease):
                focus.event(QKeyEvent(kind, key, Qt.KeyboardModifier.NoModifier))  # past the shortcuts
            return True
        return super().event(event)


class Actions:
    """The actions of one window, by name, in the order they were added."""

    def __init__(self, parent: QWidget) -> None:
        self._parent = parent
        self._actions: dict[str, QAction] = {}
        self._specs: dict[str, ActionSpec] = {}
        self._exclusive: dict[str, QActionGroup] = {}

    def __getitem__(self, name: str) -> QAction:
        return self._actions[name]

    def __iter__(self) -> Iterator[ActionSpec]:
        return iter(self._specs.values())

    def add(self, spec: ActionSpec) -> QAction:
        """Make the action and give it to the window, so that its shortcuts work."""
        assert spec.name not in self._specs, f"two actions are named {spec.name}"
        kind = YieldingAction if spec.yields else QAction
        action = kind(spec.text, self._parent)
        action.setObjectName(spec.name)
        action.setCheckable(spec.checkable)
        action.setShortcuts([QKeySequence(keys) for keys in spec.shortcuts])
        if spec.exclusive:
            self._group(spec.exclusive).addAction(action)
        if spec.checkable and not spec.exclusive:
            action.triggered.connect(lambda checked: spec.run(checked))
        else:
            action.triggered.connect(lambda: spec.run())
        self.register(spec, action)
        self._parent.addAction(action)
        return action

    def register(self, spec: ActionSpec, action: QAction) -> None:
        """Take an action that Qt made (a dock's own) into the registry."""
        self._specs[spec.name], self._actions[spec.name] = spec, action
        keys = action.shortcut().toString(QKeySequence.SequenceFormat.NativeText)
        tip = spec.tip or spec.text.rstrip("…")
        action.setToolTip(f"{tip} ({keys})" if keys else tip)

    def in_group(self, group: str) -> list[ActionSpec]:
        """The actions of one menu."""
        return [spec for spec in self if spec.group == group]

    def apply_theme(self, theme: Theme) -> None:
        """Draw the icons in the colours of `theme`."""
        for spec in self:
            if spec.icon:
                self._actions[spec.name].setIcon(icon(spec.icon, theme.text, theme.border))

    def _group(self, name: str) -> QActionGroup:
        if name not in self._exclusive:
            self._exclusive[name] = QActionGroup(self._parent)
        return self._exclusive[name]
