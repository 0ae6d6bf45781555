"""Functions that create common Qt widgets in the stylesheet's looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QComboBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLayout,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QToolButton,
    QWidget,
)

from kvscope_app.ui.icons import icon
from kvscope_app.ui.number_fields import NumberBox
from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.theme import Theme, mix


def tool_button(text: str, tip: str, *, checkable: bool = False, checked: bool = False) -> QToolButton:
    button = QToolButton()
    button.setText(text)
    button.setToolTip(tip)
    button.setAccessibleName(text)
    button.setCheckable(checkable)
    button.setChecked(checked)
    return button


def set_icon(button: QToolButton, name: str, theme: Theme) -> None:
    color = theme.accent if button.isCheckable() and button.isChecked() else theme.muted
    button.setIcon(icon(name, color, mix(theme.muted, theme.panel, 0.6)))
    button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonIconOnly)


def label(text: str = "", look: str = "", *, wraps: bool = False, elastic: bool = False) -> QLabel:
    """Return a plain-text label. An `elastic` label may become narrower than its text, and so may its dock."""
    result = PlainLabel(text)
    result.setProperty("look", look)
    result.setWordWrap(wraps)
    if elastic:
        result.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
    return result


def label_boxes(parent: QWidget) -> None:
    """Give each combo box in `parent` a hidden label with its accessible name.

    Screen readers on Linux announce a combo box by its current value. They announce its purpose only if it has a label.
    """
    for box in parent.findChildren(QComboBox):
        container = box.parentWidget()
        labels = container.findChildren(QLabel) if container is not None else []
        if box.accessibleName() and all(each.buddy() is not box for each in labels):
            hidden = PlainLabel(box.accessibleName(), container)
            hidden.setBuddy(box)
            hidden.hide()


def number_label(text: str = "") -> QLabel:
    """Return a right-aligned label for a number, with text that can be selected and copied."""
    result = label(text)
    result.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
    result.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return result


def combo_box(items: Sequence[str], name: str) -> QComboBox:
    box = QComboBox()
    box.addItems(list(items))
    box.setAccessibleName(name)
    return box


def seconds_box(minimum: float, maximum: float, value: float, name: str) -> NumberBox:
    box = NumberBox()
    box.setDecimals(1)
    box.setRange(round(minimum, 1), round(maximum, 1))
    box.setValue(value)
    box.setSuffix(" s")
    box.setAccessibleName(name)
    return box


def head_row(bar: QLayout) -> QWidget:
    """Return a widget with the layout `bar` for the top of a view. Its minimum width does not limit the dock's
    width.
    """
    row = QWidget()
    row.setLayout(bar)
    vertical = QSizePolicy.Policy.Minimum if bar.hasHeightForWidth() else QSizePolicy.Policy.Fixed  # wrapping grows it
    row.setSizePolicy(QSizePolicy.Policy.Ignored, vertical)
    return row


def empty_state(text: str) -> QLabel:
    result = label(text, "muted", wraps=True)
    result.setAlignment(Qt.AlignmentFlag.AlignCenter)
    result.setContentsMargins(24, 24, 24, 24)
    return result


def show_choices(row: QHBoxLayout, choices: Sequence[tuple[str, Callable[[], object]]]) -> None:
    """Replace the contents of `row` by a button for each (label, callback). The first is the primary button."""
    while (item := row.takeAt(0)) is not None:
        if (widget := item.widget()) is not None:
            widget.hide()
            widget.deleteLater()
    for index, (text, run) in enumerate(choices):
        button = QPushButton(text)
        button.setProperty("look", "primary" if index == 0 else "")
        button.clicked.connect(run)
        row.addWidget(button)
        button.show()  # now, or the layout reserves no space for it


def scroll_area(body: QWidget) -> QScrollArea:
    """Return a frameless scroll area around `body`, which fills its width. Tab skips the area itself."""
    area = QScrollArea()
    area.setFocusPolicy(Qt.FocusPolicy.NoFocus)
    area.setWidget(body)
    area.setWidgetResizable(True)
    area.setFrameShape(QFrame.Shape.NoFrame)
    return area


def set_look(widget: QWidget, look: str) -> None:
    """Change the `look` property of a widget and reapply the stylesheet."""
    if widget.property("look") != look:
        widget.setProperty("look", look)
        widget.style().unpolish(widget)
        widget.style().polish(widget)
