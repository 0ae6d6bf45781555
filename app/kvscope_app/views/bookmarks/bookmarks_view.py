"""View of bookmarks and past alarms: go to one, rename it, delete it, or loop between two.

Owns the filter and the selection. The session owns the bookmarks and their undo history.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from PySide6.QtCore import (
    QAbstractListModel,
    QEvent,
    QItemSelectionModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    Qt,
    Signal,
)
from PySide6.QtGui import QGuiApplication, QKeyEvent, QKeySequence, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QBoxLayout,
    QHBoxLayout,
    QListView,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.session.mark_labels import mark_text
from kvscope_app.session.recording.bookmarks import Bookmarks
from kvscope_app.session.session import Session
from kvscope_app.ui.editing import edit_item
from kvscope_app.ui.mark_signs import sign_pixmap
from kvscope_app.ui.number_text import seconds
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import empty_state, head_row, set_icon, tool_button
from kvscope_app.ui.widgets import SegmentedControl
from kvscope_app.views.base import View
from kvscope_telemetry.summaries.bookmark import Bookmark

Index = QModelIndex | QPersistentModelIndex
_ROLE = Qt.ItemDataRole
ALL, MINE, ALARMS = range(3)
EMPTY_TEXT: Final = (
    "No bookmarks yet.\nCtrl+B bookmarks the current moment, with an optional note. Alarms are listed here "
    "when they fire."
)
_NUM_BUTTONS: Final = 5


class BookmarkList(QListView):
    delete_pressed = Signal()
    undo_pressed = Signal()

    @property
    def is_edited(self) -> bool:
        return self.state() == QAbstractItemView.State.EditingState

    def event(self, event: QEvent) -> bool:
        """Claim the Undo and Copy shortcuts, which apply to bookmarks while the list has the focus."""
        if event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent):
            shortcuts = (QKeySequence.StandardKey.Undo, QKeySequence.StandardKey.Copy)
            if any(event.matches(each) for each in shortcuts):
                event.accept()
                return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Delete:
            self.delete_pressed.emit()
        elif event.matches(QKeySequence.StandardKey.Undo):
            self.undo_pressed.emit()
        elif event.matches(QKeySequence.StandardKey.Copy):
            rows = sorted(index.row() for index in self.selectedIndexes())
            QGuiApplication.clipboard().setText("\n".join(self.model().index(row, 0).data() for row in rows))
        else:
            super().keyPressEvent(event)


class BookmarksView(View):
    title: ClassVar[str] = "Bookmarks"
    object_name: ClassVar[str] = "bookmarks"
    refresh_hz: ClassVar[float] = 4.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.model = BookmarkModel(session.bookmarks, self)
        self.list = BookmarkList()
        self.list.setModel(self.model)
        self.list.setAccessibleName("Bookmarks and alarms")
        self.list.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.list.setEditTriggers(QAbstractItemView.EditTrigger.EditKeyPressed)
        self.list.setUniformItemSizes(True)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.list.setFrameShape(QListView.Shape.NoFrame)
        self.choices = SegmentedControl(["All", "Mine", "Alarms"], "Filter")
        self.add = tool_button("Bookmark", "Bookmark the current moment (Ctrl+B)")
        self.rename = tool_button("Rename", "Rename the selected bookmark (F2)")
        self.delete = tool_button("Delete", "Delete the selected bookmarks (Del); can be undone")
        self.loop = tool_button("Loop", "Loop between two selected bookmarks, or over a selected alarm")
        self.undo = tool_button("Undo", "Restore the bookmark deleted last")
        self.undo.hide()
        self._bar = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._lay_out()
        self._connect()
        self.setFocusProxy(self.list)

    def refresh(self) -> None:
        if self.list.is_edited:  # refreshing would discard the edited text
            return
        selected_ids = {mark.bookmark_id for mark in self.chosen}
        if self.model.refresh():
            self._restore_selection(selected_ids)
        self._stack.setCurrentIndex(1 if self.session.bookmarks.shown or self.session.bookmarks.can_undo else 0)
        self.undo.setVisible(self.session.bookmarks.can_undo)
        self._update_buttons()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.model.theme = theme
        for button, name in ((self.add, "plus"), (self.rename, "pencil"), (self.delete, "trash"), (self.loop, "loop")):
            set_icon(button, name, theme)
        self.list.viewport().update()

    @property
    def chosen(self) -> list[Bookmark]:
        rows = sorted(index.row() for index in self.list.selectedIndexes())
        return [self.model.marks[row] for row in rows if row < len(self.model.marks)]

    @property
    def loop_range(self) -> tuple[int, int] | None:
        """Start and end in ns of the selected bookmarks: at least two bookmarks, or one alarm. None for any other
        selection.
        """
        selected = self.chosen
        if len(selected) >= 2:
            return selected[0].time_ns, max(selected[-1].time_ns, selected[-1].until_ns)
        if len(selected) == 1 and selected[0].until_ns:
            return selected[0].time_ns, selected[0].until_ns
        return None

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        directions = QBoxLayout.Direction
        is_narrow = self.width() < self.choices.sizeHint().width() + _NUM_BUTTONS * self.add.sizeHint().width() + 24
        self._bar.setDirection(directions.TopToBottom if is_narrow else directions.LeftToRight)

    def _restore_selection(self, selected_ids: set[str]) -> None:
        flags = QItemSelectionModel.SelectionFlag.Select
        for row, mark in enumerate(self.model.marks):
            if mark.bookmark_id in selected_ids:
                self.list.selectionModel().select(self.model.index(row, 0), flags)

    def _on_clicked(self) -> None:
        if len(selected := self.chosen) == 1:
            self.session.timeline.go_to(selected[0].time_ns)

    def _on_add(self) -> None:
        if self.session.timeline.range_ns is not None:
            bookmark = self.session.bookmarks.add(self.session.timeline.cursor_ns)
            row = next((row for row, mark in enumerate(self.model.marks) if mark == bookmark), None)
            if row is not None:
                edit_item(self.list, self.model.index(row, 0))

    def _on_rename(self) -> None:
        if len(self.list.selectedIndexes()) == 1:
            edit_item(self.list, self.list.selectedIndexes()[0])

    def _on_delete(self) -> None:
        self.session.bookmarks.delete(self.chosen)
        self.refresh()

    def _on_undo(self) -> None:
        self.session.bookmarks.undo()
        self.refresh()

    def _on_loop(self) -> None:
        if (range_ns := self.loop_range) is not None:
            loop = self.session.timeline.loop
            loop.set_range(*range_ns)
            loop.play()

    def _on_choice(self, choice: int) -> None:
        self.model.choice = choice
        self.refresh()

    def _update_buttons(self) -> None:
        selected = self.chosen
        stored = [mark for mark in selected if self.session.bookmarks.is_stored(mark)]
        self.add.setEnabled(self.session.timeline.range_ns is not None)
        self.rename.setEnabled(len(selected) == len(stored) == 1)
        self.delete.setEnabled(bool(stored))
        self.loop.setEnabled(self.loop_range is not None)

    def _connect(self) -> None:
        self.session.bookmarks.changed.connect(self.refresh)
        self.list.clicked.connect(self._on_clicked)
        self.list.activated.connect(self._on_clicked)
        self.list.selectionModel().selectionChanged.connect(self._update_buttons)
        self.list.itemDelegate().closeEditor.connect(self.refresh)
        self.list.delete_pressed.connect(self._on_delete)
        self.list.undo_pressed.connect(self._on_undo)
        self.choices.chosen.connect(self._on_choice)
        for button, run in (
            (self.add, self._on_add),
            (self.rename, self._on_rename),
            (self.delete, self._on_delete),
            (self.loop, self._on_loop),
            (self.undo, self._on_undo),
        ):
            button.clicked.connect(run)

    def _lay_out(self) -> None:
        buttons = QHBoxLayout()
        buttons.setSpacing(4)
        buttons.addStretch()
        for widget in (self.undo, self.loop, self.rename, self.delete, self.add):
            buttons.addWidget(widget)
        self._bar.setContentsMargins(8, 6, 8, 4)
        self._bar.setSpacing(4)
        self._bar.addWidget(self.choices, 0, Qt.AlignmentFlag.AlignLeft)
        self._bar.addLayout(buttons, 1)
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(head_row(self._bar))
        column.addWidget(self.list, 1)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(empty_state(EMPTY_TEXT))
        self._stack.addWidget(body)


class BookmarkModel(QAbstractListModel):
    def __init__(self, bookmarks: Bookmarks, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.choice = ALL
        self.marks: list[Bookmark] = []
        self._bookmarks = bookmarks

    def refresh(self) -> bool:
        """Update the rows from the bookmarks. Returns whether any row changed. If so, the view loses its selection."""
        marks = [mark for mark in self._bookmarks.shown if self.choice in (ALL, MINE if mark.is_user_note else ALARMS)]
        if marks == self.marks:
            return False
        self.beginResetModel()
        self.marks = marks
        self.endResetModel()
        return True

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self.marks)

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = super().flags(index)
        is_editable = index.isValid() and self._bookmarks.is_stored(self.marks[index.row()])
        return flags | Qt.ItemFlag.ItemIsEditable if is_editable else flags

    def data(self, index: Index, role: int = _ROLE.DisplayRole) -> Any:
        if not index.isValid():
            return None
        mark = self.marks[index.row()]
        if role == _ROLE.DisplayRole:
            return _line(mark)
        if role == _ROLE.ToolTipRole:
            return plain_tip(_line(mark))
        if role == _ROLE.EditRole:
            return mark.text
        if role == _ROLE.DecorationRole:
            return sign_pixmap(is_note=mark.is_user_note, theme=self.theme)
        return None

    def setData(self, index: Index, value: Any, role: int = _ROLE.EditRole) -> bool:
        if role != _ROLE.EditRole or not index.isValid() or str(value).strip() == self.marks[index.row()].text:
            return False
        self._bookmarks.rename(self.marks[index.row()], str(value))
        return True


def _line(mark: Bookmark) -> str:
    duration_text = f"  ({seconds((mark.until_ns - mark.time_ns) / 1e9)})" if mark.until_ns else ""
    return mark_text(mark) + duration_text
