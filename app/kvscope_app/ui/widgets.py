"""Elided labels, and a segmented control, for several views."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, QSize, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QButtonGroup, QFrame, QHBoxLayout, QMenu, QSizePolicy, QToolButton, QWidget

from kvscope_app.ui.plain_text import PlainLabel, plain_tip


class ElidedLabel(PlainLabel):
    """Label that elides its text instead of requesting more space. The tooltip has the full text if it is elided."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(text, parent)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)

    def minimumSizeHint(self) -> QSize:
        return QSize(24, super().minimumSizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        elided = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, self.width())
        painter.setPen(self.palette().color(self.foregroundRole()))
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, elided)
        painter.end()
        tip = self._tip(is_elided=elided != self.text())
        if tip != self.toolTip():
            self.setToolTip(tip)

    def _tip(self, *, is_elided: bool) -> str:
        return plain_tip(self.text()) if is_elided else ""


class FittingLabel(ElidedLabel):
    """Label that shows the longest of several texts that fits. The tooltip has the longest text if a shorter one is
    shown.
    """

    def __init__(self, *lengths: str, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._lengths: tuple[str, ...] = ()
        self.set_variants(*lengths)

    def sizeHint(self) -> QSize:
        """Return the size of the longest text, whichever text is shown."""
        margins = self.contentsMargins()
        width = self.fontMetrics().horizontalAdvance(self.longest) + margins.left() + margins.right() + 1
        return QSize(width, super().sizeHint().height())

    @property
    def longest(self) -> str:
        return self._lengths[0] if self._lengths else ""

    def set_variants(self, *lengths: str) -> None:
        """Set the texts, longest first."""
        if lengths != self._lengths:
            self._lengths = lengths
            self.setAccessibleName(self.longest)
            self.updateGeometry()
            self._update_text()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._update_text()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() is QEvent.Type.FontChange:
            self._update_text()

    def _tip(self, *, is_elided: bool) -> str:
        return plain_tip(self.longest) if is_elided or self.text() != self.longest else ""

    def _update_text(self) -> None:
        metrics, available = self.fontMetrics(), self.contentsRect().width()
        fitting_texts = (text for text in self._lengths if metrics.horizontalAdvance(text) <= available)
        self.setText(next(fitting_texts, self._lengths[-1] if self._lengths else ""))


_SPACING = 1
_MIN_PADDING = 10
"""Minimum horizontal padding of a compact button in pixels, both sides together."""
_COMPACT_STYLE = "padding-left: 3px; padding-right: 3px;"


class _CompactButton(QToolButton):
    def __init__(self) -> None:
        super().__init__()
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)

    def minimumSizeHint(self) -> QSize:
        width = self.fontMetrics().horizontalAdvance(self.text()) + _MIN_PADDING
        return QSize(width, super().minimumSizeHint().height())


class SegmentedControl(QFrame):
    """Row of buttons of which one is checked. Button `index` has the label `labels[index]`."""

    chosen = Signal(int)
    """Emitted with the index of the button that the user pressed."""

    def __init__(
        self, labels: Sequence[str], name: str, parent: QWidget | None = None, *, is_collapsible: bool = False
    ) -> None:
        """Create the control with the first button checked.

        Args:
            labels: Texts of the buttons.
            name: Accessible name.
            parent: Parent widget.
            is_collapsible: Whether the buttons may be replaced if space is short: first by buttons with less padding,
                then by one button with a menu.
        """
        super().__init__(parent)
        self.setAccessibleName(name)
        self.setProperty("look", "segments")
        self._group, self._row = QButtonGroup(self), QHBoxLayout(self)
        self._is_collapsible, self._saved_width = is_collapsible, 0
        row = self._row
        row.setContentsMargins(2, 2, 2, 2)
        row.setSpacing(_SPACING)
        for index, label in enumerate(labels):
            button = _CompactButton() if is_collapsible else QToolButton()
            button.setText(label)
            button.setCheckable(True)
            button.setAccessibleName(f"{name}: {label}")
            self._group.addButton(button, index)
            row.addWidget(button)
        self.menu_button = QToolButton()
        self.menu_button.setAccessibleName(name)
        self.menu_button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.menu_button.setMenu(QMenu(self.menu_button))
        self.menu_button.menu().setToolTipsVisible(True)
        self.menu_button.menu().aboutToShow.connect(self._fill_menu)
        self.menu_button.hide()
        row.addWidget(self.menu_button)
        self._group.button(0).setChecked(True)
        self._group.idClicked.connect(self.chosen)
        self._group.idToggled.connect(self._update_menu_button)
        self._update_menu_button()

    def sizeHint(self) -> QSize:
        if not self._is_collapsible:
            return super().sizeHint()
        margins = self._row.contentsMargins()
        height = max(button.sizeHint().height() for button in self._group.buttons())
        extra_width = margins.left() + margins.right() - _SPACING
        return QSize(self._buttons_width() + self._saved_width + extra_width, height + margins.top() + margins.bottom())

    def minimumSizeHint(self) -> QSize:
        if not self._is_collapsible:
            return super().minimumSizeHint()
        margins = self._row.contentsMargins()
        width = min(self.menu_button.sizeHint().width(), self._min_buttons_width())
        return QSize(width + margins.left() + margins.right(), self.sizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._update_arrangement()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() is QEvent.Type.FontChange:
            self._update_arrangement()

    def _update_arrangement(self) -> None:
        if not self._is_collapsible:
            return
        margins = self._row.contentsMargins()
        available = self.width() - margins.left() - margins.right()
        if (available < self._buttons_width() + self._saved_width - _SPACING) is not bool(self._saved_width):
            self._set_compact(not self._saved_width)
        is_clipped = available < self._min_buttons_width()
        if is_clipped is self.menu_button.isHidden():
            had_focus = any(button.hasFocus() for button in (*self._group.buttons(), self.menu_button))
            for button in self._group.buttons():
                button.setHidden(is_clipped)
            self.menu_button.setVisible(is_clipped)
            if had_focus:
                (self.menu_button if is_clipped else self._group.checkedButton() or self._group.button(0)).setFocus()

    def _min_buttons_width(self) -> int:
        widths = [button.minimumSizeHint().width() + _SPACING for button in self._group.buttons()]
        return sum(widths) - _SPACING

    def _update_menu_button(self) -> None:
        checked = self._group.checkedButton()
        if checked is not None:
            self.menu_button.setText(f"{checked.text()} ▾")

    def _fill_menu(self) -> None:
        menu = self.menu_button.menu()
        menu.clear()
        for button in self._group.buttons():
            action = menu.addAction(button.text(), button.click)
            action.setCheckable(True)
            action.setChecked(button.isChecked())
            action.setEnabled(button.isEnabled())
            action.setToolTip(button.toolTip())

    def set_compact(self, is_compact: bool) -> None:
        if is_compact is not bool(self._saved_width):
            self._set_compact(is_compact)

    @property
    def saved_width(self) -> int:
        """Pixels that the reduced padding saves; 0 with normal padding."""
        return self._saved_width

    def _buttons_width(self) -> int:
        return sum(button.sizeHint().width() + _SPACING for button in self._group.buttons())

    def _set_compact(self, is_compact: bool) -> None:
        old_width = self._buttons_width()
        for button in self._group.buttons():
            button.setStyleSheet(_COMPACT_STYLE if is_compact else "")
        self._saved_width = old_width - self._buttons_width() if is_compact else 0

    def set_current(self, index: int) -> None:
        """Check a button without emitting `chosen`."""
        self._group.button(index).setChecked(True)

    def clear(self) -> None:
        self._group.setExclusive(False)
        for button in self._group.buttons():
            button.setChecked(False)
        self._group.setExclusive(True)

    def set_button_visible(self, index: int, is_visible: bool) -> None:
        self._group.button(index).setVisible(is_visible)

    def is_shown(self, index: int) -> bool:
        return not self._group.button(index).isHidden()

    def width_of(self, index: int) -> int:
        return self._group.button(index).sizeHint().width() + _SPACING

    def set_button_enabled(self, index: int, is_enabled: bool) -> None:
        self._group.button(index).setEnabled(is_enabled)

    def set_tip(self, index: int, tip: str) -> None:
        self._group.button(index).setToolTip(tip)
