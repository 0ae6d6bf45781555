"""What clicks, waits and looks at a window for the tests: by what a person reads, presses and points at.

A part is found by its kind, its words or its name in Qt (`objectName`, `accessibleName`), never by a private attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from PySide6.QtCore import QEvent, QObject, QPoint, QPointF, Qt, QTimer
from PySide6.QtGui import QMouseEvent
from PySide6.QtWidgets import (
    QAbstractButton,
    QApplication,
    QComboBox,
    QLabel,
    QListWidget,
    QMainWindow,
    QPushButton,
    QTableView,
    QWidget,
)

Kind = TypeVar("Kind", bound=QWidget)


def lines(widget: QWidget) -> list[str]:
    """Texts of all labels and buttons that are shown in `widget`, or in it alone if it is one; not those hidden."""
    parts = [widget, *widget.findChildren(QWidget)]
    shown = [part for part in parts if part is widget or part.isVisibleTo(widget)]
    return [part.text() for part in shown if isinstance(part, QLabel | QAbstractButton) and part.text()]


def text(widget: QWidget) -> str:
    """All that is read in `widget`, a line each."""
    return "\n".join(lines(widget))


def only(widget: QWidget, kind: type[Kind]) -> Kind:
    """The one part of this kind in `widget`."""
    (found,) = widget.findChildren(kind)
    return found


def named(widget: QWidget, name: str, kind: type[Kind] = QLabel) -> Kind:  # type: ignore[assignment]
    """The part that Qt knows by this name."""
    found = widget.findChild(kind, name)
    assert found is not None, f"no {kind.__name__} {name!r} in {widget!r}"
    return found


def status(window: QWidget, name: str) -> QLabel:
    """A label of the window's status bar, such as `state` or `frames`."""
    return named(window.statusBar(), name)


def corner(window: QWidget) -> QWidget:
    """The end of the menu bar."""
    return window.menuBar().cornerWidget()


def moment_shown(window: QWidget) -> str:
    """What the end of the menu bar says of the time that is shown, such as `LIVE`."""
    labels = corner(window).findChildren(QLabel)
    (found,) = [label for label in labels if label.accessibleName().startswith("Current view")]
    return found.text()


def button(widget: QWidget, words: str) -> QAbstractButton:
    """The button that says this, or is called so by a screen reader."""
    kinds = widget.findChildren(QAbstractButton)
    found = [each for each in kinds if words in (each.text().replace("&", ""), each.accessibleName())]
    assert len(found) == 1, f"{len(found)} buttons {words!r} among {[each.text() for each in kinds]}"
    return found[0]


def press(widget: QWidget, words: str) -> None:
    """Click the button that says this."""
    button(widget, words).click()


def press_default(dialog: QWidget) -> None:
    """As Enter does: click the button that a dialog proposes."""
    (proposed,) = [each for each in dialog.findChildren(QPushButton) if each.isDefault()]
    proposed.click()


def choose(box: QComboBox, row: int) -> None:
    """Take a row of a list that folds out, as a person does."""
    box.setCurrentIndex(row)
    box.activated.emit(row)


def rows(found: QListWidget) -> list[str]:
    """What a list shows."""
    return [found.item(row).text() for row in range(found.count())]


def load_only(window: QWidget, names: Iterable[str] = ()) -> None:
    """Of the docked views of a new window, load these alone: all of them take a second."""
    wanted = set(names)
    docked = window.docked
    docked._unloaded = [spec for spec in docked._unloaded if spec.name in wanted]


def has_all_views(window: QWidget) -> bool:
    """Whether each dock holds its view."""
    return set(window.docks) <= set(window.views)


def facts(table: QTableView) -> dict[str, str]:
    """What a table of facts says: a name and a value a row, headings left out."""
    model = table.model()
    cells = [[model.index(row, column).data() for column in (0, 1)] for row in range(model.rowCount())]
    return {name: value for name, value in cells if value is not None}


def point_at(canvas: QWidget, block: int, qtbot: object) -> None:
    """Let the mouse stand on a block of the page map."""
    qtbot.mouseMove(canvas, canvas.cell_rect(block).center())


def drag(widget: QWidget, begin: QPoint, end: QPoint, qtbot: object, which: object) -> None:
    """Press, move and let go."""
    qtbot.mousePress(widget, which, pos=begin)
    qtbot.mouseMove(widget, end)
    qtbot.mouseRelease(widget, which, pos=end)


def move_dock_edge(window: QMainWindow, name: str, width: int) -> None:
    """Make a dock `width` pixels wide while a mouse button is pressed, as a user does who drags its edge."""

    def mouse(kind: QEvent.Type) -> None:
        at, left = QPointF(1, 1), Qt.MouseButton.LeftButton
        QApplication.sendEvent(window, QMouseEvent(kind, at, at, left, left, Qt.KeyboardModifier.NoModifier))

    mouse(QEvent.Type.MouseButtonPress)
    window.resizeDocks([window.docks[name]], [width], Qt.Orientation.Horizontal)
    mouse(QEvent.Type.MouseButtonRelease)


def is_at_rest(part: QObject) -> bool:
    """Whether nothing of it wakes up by itself: no timer in it runs."""
    return not any(timer.isActive() for timer in part.findChildren(QTimer))


def poll_until(session: object, is_so: Callable[[], bool], qtbot: object) -> None:
    """Take what an engine tells until something is so: how things stand is told four times a second at most."""

    def look() -> bool:
        session.poll()
        return is_so()

    qtbot.waitUntil(look, timeout=120_000)
