"""Widgets that select the shown conversation: a list beside it if there is space, otherwise a drop-down above it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from typing import Any, Final

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, QSize, Qt
from PySide6.QtGui import QColor, QContextMenuEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QComboBox,
    QListView,
    QMenu,
    QSizePolicy,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionComboBox,
    QStyleOptionViewItem,
    QStylePainter,
)

from kvscope_app.ui.editing import edit_item
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.console.answer_text import exact_time
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.conversation import Conversation

Index = QModelIndex | QPersistentModelIndex

DATE_ROLE: Final = Qt.ItemDataRole.UserRole
"""Item role with the time of a conversation's last change as text."""
_WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_GAP_PX: Final = 10
"""Space in pixels between a title and its date, and between the date and the right edge."""
_TITLE_MARGINS_PX: Final = 10
"""Pixels reserved for the margins that the style adds around the title."""


class ConversationModel(QAbstractListModel):
    """Item model of the chat's conversations, newest first. Titles can be edited."""

    def __init__(self, chat: Chat, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self._chat = chat
        self._shown: list[Conversation] = list(chat.conversations)

    def refresh(self) -> None:
        if self._shown != self._chat.conversations:
            self.beginResetModel()
            self._shown = list(self._chat.conversations)
            self.endResetModel()
        elif self._shown:
            self.dataChanged.emit(self.index(0), self.index(len(self._shown) - 1))

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._shown)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not 0 <= index.row() < len(self._shown):
            return None
        conversation = self._shown[index.row()]
        is_writing = self._chat.is_writing(conversation.key)
        if role == Qt.ItemDataRole.DisplayRole:
            return f"● {conversation.title}" if is_writing else conversation.title
        if role == Qt.ItemDataRole.EditRole:
            return conversation.title
        if role == Qt.ItemDataRole.ToolTipRole:
            last = "An answer is being written" if is_writing else exact_time(conversation.changed_s)
            return plain_tip(f"{conversation.title}\n{last}")
        if role == DATE_ROLE:
            return date_text(conversation.changed_s)
        return None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        if role != Qt.ItemDataRole.EditRole or not 0 <= index.row() < len(self._shown):
            return False
        self._chat.rename(self._shown[index.row()], str(value))
        return True

    def flags(self, index: Index) -> Qt.ItemFlag:
        return super().flags(index) | Qt.ItemFlag.ItemIsEditable


class TitleDelegate(QStyledItemDelegate):
    """Paints a conversation's title, elided if necessary, and the date of its last change at the right edge."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, option, index)
        theme = getattr(index.model(), "theme", DARK)
        painter.save()
        is_selected = bool(option.state & QStyle.StateFlag.State_Selected)
        painter.setPen(QColor(theme.accent_text if is_selected else theme.muted))
        box = option.rect.adjusted(0, 0, -_GAP_PX, 0)
        painter.drawText(box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, index.data(DATE_ROLE))
        painter.restore()

    def initStyleOption(self, option: QStyleOptionViewItem, index: Index) -> None:
        super().initStyleOption(option, index)
        width = option.rect.width() - self._date_width(option, index) - 2 * _GAP_PX - _TITLE_MARGINS_PX
        option.text = option.fontMetrics.elidedText(option.text, Qt.TextElideMode.ElideRight, max(width, 0))

    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:
        size = super().sizeHint(option, index)
        title_width = option.fontMetrics.horizontalAdvance(index.data())
        # One gap more than needed, so that the title is not elided if the style's margins are wider.
        return QSize(title_width + self._date_width(option, index) + 3 * _GAP_PX + _TITLE_MARGINS_PX, size.height())

    @staticmethod
    def _date_width(option: QStyleOptionViewItem, index: Index) -> int:
        return option.fontMetrics.horizontalAdvance(index.data(DATE_ROLE) or "")


def date_text(changed_s: float, now_s: float | None = None) -> str:
    """Return when a conversation changed: the local time of day, `Yesterday`, a weekday of the last week, or the date.

    Both arguments are seconds since 1970.
    """
    changed, today = time.localtime(changed_s), time.localtime(now_s)
    num_days = date(*today[:3]).toordinal() - date(*changed[:3]).toordinal()
    if num_days == 0:
        return f"{changed.tm_hour:02}:{changed.tm_min:02}"
    if num_days == 1:
        return "Yesterday"
    if 1 < num_days < len(_WEEKDAYS):
        return _WEEKDAYS[changed.tm_wday]
    return f"{changed.tm_year}-{changed.tm_mon:02}-{changed.tm_mday:02}"


class ConversationList(QListView):
    """List of conversations. F2 or a double click renames; the context menu acts on the row under the mouse."""

    def __init__(
        self, model: ConversationModel, on_chosen: Callable[[int], None], on_deleted: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._on_deleted = on_deleted
        self.setAccessibleName("Conversations")
        self.setModel(model)
        self.setItemDelegate(TitleDelegate(self))
        self.setUniformItemSizes(True)
        self.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        triggers = QAbstractItemView.EditTrigger
        self.setEditTriggers(triggers.DoubleClicked | triggers.EditKeyPressed)
        self.setMinimumWidth(scaled(150))
        self.clicked.connect(lambda index: on_chosen(index.row()))
        self.activated.connect(lambda index: on_chosen(index.row()))

    def show_row(self, row: int) -> None:
        self.setCurrentIndex(self.model().index(row, 0))

    def menu_of(self, row: int) -> QMenu:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        index = QPersistentModelIndex(self.model().index(row, 0))
        menu.addAction("Rename", lambda: edit_item(self, index))
        menu.addAction("Delete", lambda: self._on_deleted(index.row()))
        return menu

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        index = self.indexAt(event.pos())
        if index.isValid():
            self.menu_of(index.row()).popup(event.globalPos())
        # The event stays accepted, also outside of the rows: the dock's own menu would act on the shown conversation.


class ConversationCombo(QComboBox):
    def __init__(self, model: ConversationModel, on_chosen: Callable[[int], None]) -> None:
        super().__init__()
        self.setAccessibleName("Conversation")
        self.setModel(model)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.setMinimumContentsLength(8)
        self.setItemDelegate(TitleDelegate(self))
        self.view().setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.activated.connect(on_chosen)

    def show_row(self, row: int) -> None:
        self.setCurrentIndex(row)

    @property
    def popup_width(self) -> int:
        """Width in pixels that fits titles and dates, at most the window's width."""
        needed = self.view().sizeHintForColumn(0) + self.view().verticalScrollBar().sizeHint().width()
        return max(min(needed, self.window().width()), self.width())

    def showPopup(self) -> None:
        self.view().setMinimumWidth(self.popup_width)
        super().showPopup()

    def paintEvent(self, event: QPaintEvent) -> None:
        option = QStyleOptionComboBox()
        self.initStyleOption(option)
        painter = QStylePainter(self)
        painter.drawComplexControl(QStyle.ComplexControl.CC_ComboBox, option)
        text_rect = self.style().subControlRect(
            QStyle.ComplexControl.CC_ComboBox, option, QStyle.SubControl.SC_ComboBoxEditField, self
        )
        option.currentText = self.fontMetrics().elidedText(
            self.currentText(), Qt.TextElideMode.ElideRight, text_rect.width() - 4
        )
        painter.drawControl(QStyle.ControlElement.CE_ComboBoxLabel, option)
        painter.end()
