"""Search field above the list of conversations, and the list of hits, which replaces it while there is a query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import QEvent, QObject, Qt, QTimer, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QLineEdit, QListWidget, QListWidgetItem, QStackedWidget, QVBoxLayout, QWidget

from kvscope_app.session.background import Background
from kvscope_app.session.background_watch import BackgroundWatch
from kvscope_app.ui.number_text import plural
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.console.answer_text import exact_time
from kvscope_app.views.console.search_index import MAX_HITS, SearchHit, SearchIndex

_TYPING_MS: Final = 120
"""Time without another key until the search begins."""
_MARGIN: Final = 8


class SearchPanel(QWidget):
    """Searches the conversations in `folder` on another thread. `save` is called before each search."""

    opened = Signal(str, str)
    """Emitted with the key of a conversation and that of a message in it, or "", when the user opens a hit."""
    activity_changed = Signal()
    """Emitted when `is_open` changed."""

    def __init__(self, conversations: QWidget, folder: Path, save: Callable[[], None]) -> None:
        super().__init__()
        self.is_open = False
        """Whether the user searches: there is a query, or `start` was called and the search was not ended."""
        self.hits: list[SearchHit] = []
        self._index, self._save = SearchIndex(folder), save
        self._task: Background[list[SearchHit]] | None = None
        self._searched = ""
        self._is_opening_first = False
        self.field = QLineEdit()
        self.field.setPlaceholderText("Search conversations")
        self.field.setAccessibleName("Search conversations")
        self.field.setClearButtonEnabled(True)
        self.results = QListWidget()
        self.results.setAccessibleName("Conversations found")
        self.results.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.results.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.status = label(look="muted", wraps=True)
        self._typing_timer = QTimer(self, singleShot=True, interval=_TYPING_MS)
        self._lay_out(conversations)
        self._connect()

    def start(self) -> None:
        """Begin a search: focus the field and select its text."""
        self._set_open(True)
        self.field.selectAll()
        self.field.setFocus()

    def end(self) -> None:
        """Clear the query and show all conversations."""
        self.field.clear()
        self._set_open(False)

    @property
    def has_focus(self) -> bool:
        return self.is_open and (self.field.hasFocus() or self.results.hasFocus())

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Move from the field to the first hit with Down."""
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress and event.key() == Qt.Key.Key_Down:
            if self.results.count():
                self.results.setFocus()
                self.results.setCurrentRow(0)
            return True
        return False

    def _on_typed(self, text: str) -> None:
        self._is_opening_first = False
        if text.strip():
            self._set_open(True)
            self._typing_timer.start()
        else:
            self._typing_timer.stop()
            self._searched = ""
            self._stack.setCurrentIndex(0)
            self._set_open(self.field.hasFocus() and not self._has_list)

    def _search(self) -> None:
        query = self.field.text()
        if self._task is not None or not query.strip():
            return
        self._save()
        self._searched = query
        if self._stack.currentIndex() == 0:  # the first search reads all conversations
            self.results.clear()
            self.status.setText("Searching…")
            self._stack.setCurrentIndex(1)
        self._task = Background(lambda _progress: self._index.search(query), "kvscope-conversation-search")
        BackgroundWatch(self._task, partial(self._on_searched, self._task), self)

    def _on_searched(self, task: Background[list[SearchHit]]) -> None:
        self._task = None
        if self._searched != self.field.text():  # typed on while the search ran
            self._search()
            return
        self._show_hits(task.result or [], task.failure)
        if self._is_opening_first:
            self._open_first()

    def _show_hits(self, hits: Sequence[SearchHit], failure: str) -> None:
        self.hits = list(hits)
        self.results.clear()
        for hit in hits:
            item = QListWidgetItem(f"{hit.title}\n{hit.excerpt}" if hit.excerpt else hit.title)
            item.setToolTip(plain_tip("\n".join(filter(None, [hit.title, exact_time(hit.changed_s), hit.excerpt]))))
            self.results.addItem(item)
        found = plural(len(hits), "conversation") if hits else "No conversation has all these words"
        self.status.setText(failure or (f"The newest {MAX_HITS} are listed" if len(hits) >= MAX_HITS else found))
        self._stack.setCurrentIndex(1)

    def _on_enter(self) -> None:
        """Open the first hit, after the search if it has not ended."""
        if self._searched == self.field.text() and self._task is None and not self._typing_timer.isActive():
            self._open_first()
        else:
            self._is_opening_first = True
            self._typing_timer.stop()
            self._search()

    def _open_first(self) -> None:
        self._is_opening_first = False
        if self.hits and self._searched:
            self._open(0)

    def _open(self, row: int) -> None:
        if 0 <= row < len(self.hits):
            hit = self.hits[row]
            if not self._has_list:
                self.end()
            self.opened.emit(hit.key, hit.message)

    def show_with_list(self, has_list: bool) -> None:
        """Set whether the panel stays visible after a search, because there is space for the list."""
        self._has_list = has_list

    def _set_open(self, is_open: bool) -> None:
        if is_open != self.is_open:
            self.is_open = is_open
            self.activity_changed.emit()

    def _connect(self) -> None:
        self.field.textChanged.connect(self._on_typed)
        self.field.returnPressed.connect(self._on_enter)
        self.field.installEventFilter(self)
        self.results.itemClicked.connect(lambda item: self._open(self.results.row(item)))
        self.results.itemActivated.connect(lambda item: self._open(self.results.row(item)))
        self._typing_timer.timeout.connect(self._search)

    def _lay_out(self, conversations: QWidget) -> None:
        self._has_list = True
        found = QWidget()
        found_column = QVBoxLayout(found)
        found_column.setContentsMargins(0, 0, 0, 0)
        found_column.addWidget(self.status)
        found_column.addWidget(self.results, 1)
        self.status.setContentsMargins(_MARGIN, 0, _MARGIN, 0)
        self._stack = QStackedWidget()
        self._stack.addWidget(conversations)
        self._stack.addWidget(found)
        self._stack.setMinimumWidth(scaled(150))
        field_row = QVBoxLayout()
        field_row.setContentsMargins(_MARGIN, _MARGIN, _MARGIN, 0)
        field_row.addWidget(self.field)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addLayout(field_row)
        column.addWidget(self._stack, 1)
