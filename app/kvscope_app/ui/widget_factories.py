"""Factories for Qt widgets with the looks of the stylesheet."""

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
    """Show an icon instead of the text, in the theme's colours; the accent colour if the button is checked."""
    color = theme.accent if button.isCheckable() and button.isChecked() else theme.muted
    button.setIcon(icon(name, color, mix(theme.muted, theme.panel, 0.6)))
    button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonIconOnly)


def label(text: str = "", look: str = "", *, wraps: bool = False, elastic: bool = False) -> QLabel:
    """Return a plain-text label. `elastic`: it may be squeezed instead of widening its dock."""
    made = PlainLabel(text)
    made.setProperty("look", look)
    made.setWordWrap(wraps)
    if elastic:
        made.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
    return made


def label_boxes(parent: QWidget) -> None:
    """Give each combo box in `parent` a hidden label with its accessible name.

    Screen readers on Linux announce a combo box by its current value, and take its purpose from its label.
    """
    for box in parent.findChildren(QComboBox):
        around = box.parentWidget()
        labels = around.findChildren(QLabel) if around is not None else []
        if box.accessibleName() and all(each.buddy() is not box for each in labels):
            hidden = PlainLabel(box.accessibleName(), around)
            hidden.setBuddy(box)
            hidden.hide()


def number_label(text: str = "") -> QLabel:
    """Return a right-aligned label for a number, which can be selected and copied."""
    made = label(text)
    made.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
    made.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return made


def combo_box(items: Sequence[str], name: str) -> QComboBox:
    """Return a combo box of `items`. `name` is its accessible name."""
    box = QComboBox()
    box.addItems(list(items))
    box.setAccessibleName(name)
    return box


def seconds_box(minimum: float, maximum: float, value: float, name: str) -> NumberBox:
    """Return a field for a time between `minimum` and `maximum` seconds, in steps of 0.1 s."""
    box = NumberBox()
    box.setDecimals(1)
    box.setRange(round(minimum, 1), round(maximum, 1))
    box.setValue(value)
    box.setSuffix(" s")
    box.setAccessibleName(name)
    return box


def head_row(bar: QLayout) -> QWidget:
    """Return a widget for the area above a view's content. It may be squeezed, so that a narrow dock stays narrow."""
    made = QWidget()
    made.setLayout(bar)
    vertical = QSizePolicy.Policy.Minimum if bar.hasHeightForWidth() else QSizePolicy.Policy.Fixed  # wrapping grows it
    made.setSizePolicy(QSizePolicy.Policy.Ignored, vertical)
    return made


def empty_state(text: str) -> QLabel:
    """Return the muted sentence in the centre of a view that has nothing to show."""
    made = label(text, "muted", wraps=True)
    made.setAlignment(Qt.AlignmentFlag.AlignCenter)
    made.setContentsMargins(24, 24, 24, 24)
    return made


def show_choices(row: QHBoxLayout, choices: Sequence[tuple[str, Callable[[], object]]]) -> None:
    """Replace the contents of `row` by a button for each of `choices`. The first is the primary button."""
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
    """Return `body` in a frameless scroll area that it fills horizontally. Tab skips the area itself."""
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
