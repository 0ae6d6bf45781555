"""Helpers that click, wait and inspect windows for tests by text, widget type and Qt name.

A widget is found by its type, its text or its Qt name (`objectName`, `accessibleName`), never by a private attribute.
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


def visible_texts(widget: QWidget) -> list[str]:
    """Return the texts of all labels and buttons visible in `widget`, including itself."""
    parts = [widget, *widget.findChildren(QWidget)]
    shown = [part for part in parts if part is widget or part.isVisibleTo(widget)]
    return [part.text() for part in shown if isinstance(part, QLabel | QAbstractButton) and part.text()]


def visible_text(widget: QWidget) -> str:
    """Return all visible texts in `widget`, one per line."""
    return "\n".join(visible_texts(widget))


def only_child(widget: QWidget, kind: type[Kind]) -> Kind:
    """Return the only child of this type."""
    (found,) = widget.findChildren(kind)
    return found


def child_named(widget: QWidget, name: str, kind: type[Kind] = QLabel) -> Kind:  # type: ignore[assignment]
    """Return the child with this `objectName`."""
    found = widget.findChild(kind, name)
    assert found is not None, f"no {kind.__name__} {name!r} in {widget!r}"
    return found


def status_label(window: QWidget, name: str) -> QLabel:
    """Return a label of the window's status bar, such as `state` or `frames`."""
    return child_named(window.statusBar(), name)


def menu_bar_corner(window: QWidget) -> QWidget:
    """Return the corner widget of the menu bar."""
    return window.menuBar().cornerWidget()


def current_view_text(window: QWidget) -> str:
    """Return the label at the end of the menu bar that tells the time shown, such as `LIVE`."""
    labels = menu_bar_corner(window).findChildren(QLabel)
    (found,) = [label for label in labels if label.accessibleName().startswith("Current view")]
    return found.text()


def find_button(widget: QWidget, words: str) -> QAbstractButton:
    """Return the button with this text or accessible name."""
    kinds = widget.findChildren(QAbstractButton)
    found = [each for each in kinds if words in (each.text().replace("&", ""), each.accessibleName())]
    assert len(found) == 1, f"{len(found)} buttons {words!r} among {[each.text() for each in kinds]}"
    return found[0]


def click_button(widget: QWidget, words: str) -> None:
    """Click the button with this text or accessible name."""
    find_button(widget, words).click()


def click_default_button(dialog: QWidget) -> None:
    """Click the default button of a dialog, as Enter does."""
    (proposed,) = [each for each in dialog.findChildren(QPushButton) if each.isDefault()]
    proposed.click()


def choose_row(box: QComboBox, row: int) -> None:
    """Choose a row of a combo box, as a user does."""
    box.setCurrentIndex(row)
    box.activated.emit(row)


def list_texts(found: QListWidget) -> list[str]:
    """Return the texts of a list."""
    return [found.item(row).text() for row in range(found.count())]


def load_only_views(window: QWidget, names: Iterable[str] = ()) -> None:
    """Load only these docked views of a new window, because loading all takes a second."""
    wanted = set(names)
    docked = window.docked
    docked._unloaded = [spec for spec in docked._unloaded if spec.name in wanted]


def has_all_views(window: QWidget) -> bool:
    """Whether all docked views are loaded."""
    return set(window.docks) <= set(window.views)


def table_facts(table: QTableView) -> dict[str, str]:
    """Return the names and values of a two-column table, without headings."""
    model = table.model()
    cells = [[model.index(row, column).data() for column in (0, 1)] for row in range(model.rowCount())]
    return {name: value for name, value in cells if value is not None}


def hover_block(canvas: QWidget, block: int, qtbot: object) -> None:
    """Move the mouse over a block of the page map."""
    qtbot.mouseMove(canvas, canvas.cell_rect(block).center())


def drag_mouse(widget: QWidget, begin: QPoint, end: QPoint, qtbot: object, which: object) -> None:
    """Press, move and release the mouse."""
    qtbot.mousePress(widget, which, pos=begin)
    qtbot.mouseMove(widget, end)
    qtbot.mouseRelease(widget, which, pos=end)


def move_dock_edge(window: QMainWindow, name: str, width: int) -> None:
    """Make a dock `width` pixels wide while a mouse button is pressed, as if the user dragged its edge."""

    def mouse(kind: QEvent.Type) -> None:
        at, left = QPointF(1, 1), Qt.MouseButton.LeftButton
        QApplication.sendEvent(window, QMouseEvent(kind, at, at, left, left, Qt.KeyboardModifier.NoModifier))

    mouse(QEvent.Type.MouseButtonPress)
    window.resizeDocks([window.docks[name]], [width], Qt.Orientation.Horizontal)
    mouse(QEvent.Type.MouseButtonRelease)


def has_no_running_timer(part: QObject) -> bool:
    """Whether no timer inside `part` is running."""
    return not any(timer.isActive() for timer in part.findChildren(QTimer))


def poll_until(session: object, condition: Callable[[], bool], qtbot: object) -> None:
    """Poll the session until `condition()` is true. The status is updated at most four times a second."""

    def look() -> bool:
        session.poll()
        return condition()

    qtbot.waitUntil(look, timeout=120_000)
