"""Fleet window: search field, table of engines, and status of the list.

Owns its widgets. `FleetManager` owns the readers of engines and list; the desktop opens the window of an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from PySide6.QtCore import (
    QModelIndex,
    QObject,
    QSize,
    QSortFilterProxyModel,
    Qt,
    QTimer,
    Signal,
)
from PySide6.QtGui import QCloseEvent, QColor, QKeySequence, QPixmap, QShortcut, QShowEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QComboBox,
    QHBoxLayout,
    QHeaderView,
    QLineEdit,
    QMainWindow,
    QPushButton,
    QStackedLayout,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.fleet.fleet_columns import COLUMNS, MAP, NAME, PADDING, STATE, fleet_row_tip, search_text, sort_key
from kvscope_app.fleet.map_picture import SIZE, map_pixmap
from kvscope_app.session.state_text import STATE_COLORS
from kvscope_app.ui.number_text import NOTHING, count, plural, seconds
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.table_text import selected_rows
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.ui.widget_factories import empty_state, label, tool_button
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.table import Index, OpenableTable, TableHead, TableModel
from kvscope_app.window.dialogs.attach_dialog import AttachDialog
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.fleet import Fleet
from kvscope_telemetry.fleet.fleet_list import FleetEntry
from kvscope_telemetry.fleet.fleet_row import FleetRow
from kvscope_telemetry.fleet.list_reader import ListReader, ListReading
from kvscope_telemetry.fleet.own_member import CURRENT_STATES
from kvscope_telemetry.fleet.pool_bins import PoolBins

_ROOT: Final = QModelIndex()
_MIN_COLUMN_WIDTH: Final = 56
REFRESH_MS: Final = 500
SORT_INTERVAL_S: Final = 2.0
"""Minimum seconds between two reorderings, so that rows do not constantly move away from under the mouse pointer."""
MAX_OPENED: Final = 8
NOTHING_LISTED: Final = "The list is empty."
NOTHING_KNOWN: Final = "No engines yet. Use Add engine…, or start kvscope fleet --file LIST."
NOTHING_FOUND: Final = "No engine matches."
_SIZE: Final = QSize(1320, 720)


class FleetWindow(QMainWindow):
    """Window that shows `fleet` in a table.

    `attach` opens the window of an engine, `add` adds an engine to those of the list, and `reader` reads the list (None
    if there is no list).
    """

    closing = Signal(object)

    def __init__(
        self,
        fleet: Fleet,
        themes: ThemeManager,
        attach: Callable[[Address], object],
        reader: ListReader | None,
        add: Callable[[FleetEntry], None],
    ) -> None:
        super().__init__()
        self.fleet, self._themes, self._attach, self.list_reader, self._add = fleet, themes, attach, reader, add
        self.saved_engines_error = ""
        """Error message on the saved engines, shown in a window without a list; empty if there is no error."""
        self._last_sort_s = 0.0
        self._focuses_first_row = True  # the table gets the keyboard focus once it has a row
        self._open_error = ""
        self.setWindowTitle("Fleet – kvscope")
        self.search = QLineEdit()
        self.search.setPlaceholderText("Search names, addresses, models, versions and states")
        self.search.setClearButtonEnabled(True)
        self.search.setAccessibleName("Search engines")
        self.table = FleetTable()
        self.order = OrderBox(self.table.horizontalHeader())
        self.counts = label("", elastic=True)
        self.status_label = label("", "muted", wraps=True)
        self.open_button = QPushButton("Open")
        self.add_button = QPushButton("Add engine…")
        self.reload_button = QPushButton("Reload list")
        self._empty = empty_state(NOTHING_LISTED)
        self._table_or_message = QStackedLayout()
        self._timer = QTimer(self, interval=REFRESH_MS)
        self._lay_out()
        self._connect()
        self._apply_theme(themes.theme)
        self.resize(_SIZE.boundedTo(self.screen().availableGeometry().size() * 0.94))
        self.refresh()

    def refresh(self) -> None:
        """Show the current state of the fleet.

        Rows are reordered at most every `SORT_INTERVAL_S`, unless the number of rows changes.
        """
        now_s = time.monotonic()
        sorts = now_s - self._last_sort_s >= SORT_INTERVAL_S
        if sorts:
            self._last_sort_s = now_s
        rows = self.fleet.rows
        self.table.show_rows(rows, sorts=sorts or len(rows) != len(self.table.fleet.rows))
        self.counts.setText(counts_text(rows, self.table.proxy.rowCount()))
        self._show_status()
        self._show_table_or_message()
        self._show_buttons()

    def open_selected(self) -> None:
        self._open_error = ""
        for row in self.table.selected[:MAX_OPENED]:
            try:
                self._attach(row.entry.address)
            except BadInput as error:
                self._open_error = str(error)
        self._show_status()

    def ask_engine(self) -> None:
        """Show a dialog for the address of another engine, which is then added and saved."""

        def add(address: Address) -> None:
            self._add(FleetEntry(address, dialog.fields.name.text().strip()))

        dialog = AttachDialog(self, add, "Add engine", "Add")
        dialog.show()

    # Qt overrides

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._show_table_or_message()

    def closeEvent(self, event: QCloseEvent) -> None:
        self._timer.stop()
        self._themes.changed.disconnect(self._apply_theme)
        self.closing.emit(self)
        super().closeEvent(event)

    # Private methods

    def _show_status(self) -> None:
        listed = (
            ""
            if self.list_reader is None
            else list_text(self.list_reader.name, self.list_reader.listed, time.monotonic_ns())
        )
        self.status_label.setText(
            "\n".join(filter(None, (self._open_error, self.fleet.failure, self.saved_engines_error, listed)))
        )

    def _show_table_or_message(self) -> None:
        if self.fleet.rows:
            self._empty.setText(NOTHING_FOUND)
        else:
            self._empty.setText(NOTHING_KNOWN if self.list_reader is None else NOTHING_LISTED)
        self._table_or_message.setCurrentIndex(0 if self.table.proxy.rowCount() else 1)
        if self._focuses_first_row and self.table.isVisible():
            self._focuses_first_row = False
            self.table.setFocus()

    def _show_buttons(self) -> None:
        self.open_button.setEnabled(self.table.selectionModel().hasSelection())

    def _search(self, text: str) -> None:
        self.table.proxy.search(text)
        self.refresh()

    def _escape(self) -> None:
        if self.search.text():
            self.search.clear()
        self.table.setFocus()

    def _focus_table(self) -> None:
        self.table.setFocus()
        if not self.table.selectionModel().hasSelection():
            self.table.selectRow(0)

    def _read_again(self) -> None:
        if self.list_reader is not None:
            self.list_reader.read_now()

    def _connect(self) -> None:
        self._timer.timeout.connect(self.refresh)
        self._timer.start()
        self.search.textChanged.connect(self._search)
        self.search.returnPressed.connect(self._focus_table)
        self.table.open_requested.connect(self.open_selected)
        self.table.selectionModel().selectionChanged.connect(self._show_buttons)
        self.open_button.clicked.connect(self.open_selected)
        self.add_button.clicked.connect(self.ask_engine)
        self.reload_button.clicked.connect(self._read_again)
        self._themes.changed.connect(self._apply_theme)
        keys = (
            (QKeySequence(QKeySequence.StandardKey.Find), self.search.setFocus),
            (QKeySequence("Esc"), self._escape),
            (QKeySequence("F5"), self._read_again),
            (QKeySequence("Ctrl+W"), self.close),
        )
        for key, run in keys:
            QShortcut(key, self, run)

    def _apply_theme(self, theme: Theme) -> None:
        self.table.apply_theme(theme)

    def _lay_out(self) -> None:
        body, table_area, top_row, bottom_row = QWidget(), QWidget(), QHBoxLayout(), QHBoxLayout()
        body.setObjectName("body")
        table_area.setLayout(self._table_or_message)
        self._table_or_message.addWidget(self.table)
        self._table_or_message.addWidget(self._empty)
        top_row.addWidget(self.search, 1)
        top_row.addWidget(self.order)
        self.open_button.setProperty("look", "primary")
        self.open_button.setToolTip("Watch it in its own window (Enter)")
        self.add_button.setToolTip("Watch another engine and remember it")
        self.reload_button.setToolTip("Reload the list now (F5)")
        self.reload_button.setVisible(self.list_reader is not None)
        bottom_row.addWidget(self.status_label, 1)
        bottom_row.addWidget(self.reload_button, 0, Qt.AlignmentFlag.AlignBottom)
        bottom_row.addWidget(self.add_button, 0, Qt.AlignmentFlag.AlignBottom)
        bottom_row.addWidget(self.open_button, 0, Qt.AlignmentFlag.AlignBottom)
        column = QVBoxLayout(body)
        column.setContentsMargins(12, 12, 12, 12)
        column.addLayout(top_row)
        column.addWidget(self.counts)
        column.addWidget(table_area, 1)
        column.addLayout(bottom_row)
        self.setCentralWidget(body)


class OrderBox(QWidget):
    """Fields for the sort column and direction, as a keyboard alternative to clicks on the headings.

    Synchronized with `header`, the header of the table.
    """

    def __init__(self, header: QHeaderView) -> None:
        super().__init__()
        self._header = header
        self.column = QComboBox()
        self.column.addItems([column.title for column in COLUMNS])
        self.column.setAccessibleName("Sort by")
        self.direction: QToolButton = tool_button("Descending", "Reverse order", checkable=True)
        order_label = label("&Sort by", "muted")
        order_label.setBuddy(self.column)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        for widget in (order_label, self.column, self.direction):
            row.addWidget(widget)
        self._show_header_order()
        header.sortIndicatorChanged.connect(self._show_header_order)
        self.column.activated.connect(self._apply_order)
        self.direction.clicked.connect(self._apply_order)

    def _apply_order(self) -> None:
        order = Qt.SortOrder.DescendingOrder if self.direction.isChecked() else Qt.SortOrder.AscendingOrder
        self._header.setSortIndicator(self.column.currentIndex(), order)

    def _show_header_order(self) -> None:
        self.column.setCurrentIndex(self._header.sortIndicatorSection())
        self.direction.setChecked(self._header.sortIndicatorOrder() is Qt.SortOrder.DescendingOrder)


# Texts on the engines as a whole, and on the list.
def counts_text(rows: Sequence[FleetRow], num_shown: int) -> str:
    """Return the number of engines, how many of them are online, and the total of their requests, as text."""
    if not rows:
        return ""
    reporting = [row for row in rows if row.state in CURRENT_STATES]
    parts = [f"{count(len(reporting))} of {plural(len(rows), 'engine')} online"]
    running, waiting = (
        [n for n in numbers if n is not None]
        for numbers in ([row.num_running for row in reporting], [row.num_waiting for row in reporting])
    )
    if running:
        parts.append(f"{count(sum(running))} running, {count(sum(waiting))} waiting")
    if num_shown != len(rows):
        parts.append(f"{count(num_shown)} shown")
    return " · ".join(parts)


def list_text(name: str, listed: ListReading, now_ns: int) -> str:
    """Return the name of the list, its age, and the error of the last read if it failed."""
    if not listed.num_tries:
        return f"Reading {name} …"
    if not listed.read_ns:
        return f"The list could not be read: {listed.trouble}"
    age = _age(now_ns - listed.read_ns)
    if listed.is_old:
        return f"The list is {age} old: {listed.trouble}"
    return f"List: {name}, read {age} ago" + (f"; {listed.trouble}" if listed.trouble else "")


def _age(age_ns: int) -> str:
    whole_s = max(0, age_ns) // 1_000_000_000
    return f"{whole_s} s" if whole_s < 60 else seconds(whole_s)


# Column widths, keys and order of the table. Knows neither engines nor the fleet.
class FleetTable(OpenableTable):
    def __init__(self) -> None:
        super().__init__("Engines of the fleet")
        self.setIconSize(QSize(*SIZE))
        self.verticalHeader().setDefaultSectionSize(SIZE[1] + PADDING)
        self.fleet = FleetModel(self)
        self.proxy = FleetProxy(self)
        self.proxy.setSourceModel(self.fleet)
        self.setModel(self.proxy)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSortingEnabled(True)
        self.sortByColumn(NAME, Qt.SortOrder.AscendingOrder)
        header = self.horizontalHeader()
        header.setMinimumSectionSize(scaled(_MIN_COLUMN_WIDTH))
        for position, column in enumerate(COLUMNS):
            self.setColumnWidth(position, scaled(column.width))
        header.setSectionResizeMode(MAP, QHeaderView.ResizeMode.Fixed)
        header.setSectionResizeMode(NAME, QHeaderView.ResizeMode.Stretch)

    @property
    def selected(self) -> list[FleetRow]:
        return [self.proxy.row_at(position) for position in selected_rows(self)]

    def show_rows(self, rows: tuple[FleetRow, ...], *, sorts: bool) -> None:
        """Show `rows`, and sort them again if `sorts`. The selection is kept."""
        selected = {row.entry for row in self.selected}
        self.fleet.ratio = self.devicePixelRatioF()
        self.fleet.show(rows)
        if sorts:
            self.proxy.sort_rows()
        if selected and not self.selectionModel().hasSelection():
            self._select_entries(selected)

    def apply_theme(self, theme: Theme) -> None:
        self.fleet.theme = theme
        self.viewport().update()

    def _select_entries(self, entries: set[FleetEntry]) -> None:
        for position in range(self.proxy.rowCount()):
            if self.proxy.row_at(position).entry in entries:
                self.selectRow(position)
                return


# Table models.
class FleetModel(TableModel):
    table_head: ClassVar[TableHead] = TableHead.of(COLUMNS)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: tuple[FleetRow, ...] = ()
        self.theme: Theme = DARK
        self.ratio = 1.0
        self._map_pixmaps: dict[FleetEntry, tuple[PoolBins, Theme, float, QPixmap]] = {}

    def show(self, rows: tuple[FleetRow, ...]) -> None:
        """Show `rows`. Keeps the selection if the engines and their order are unchanged."""
        before = [row.entry for row in self.rows]
        if [row.entry for row in rows] != before:
            self.beginResetModel()
            self.rows = rows
            self.endResetModel()
            self._map_pixmaps.clear()
            return
        self.rows = rows
        if rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(rows) - 1, len(COLUMNS) - 1))

    def rowCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return COLUMNS[column].text(row)
        if role == Qt.ItemDataRole.DecorationRole and column == MAP:
            return self._map_pixmap(row)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(fleet_row_tip(row))
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return self.table_head.side(column)
        if role == Qt.ItemDataRole.ForegroundRole:
            return self._text_color(row, column)
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return f"{COLUMNS[column].title}: {COLUMNS[column].text(row)}"
        return None

    def _text_color(self, row: FleetRow, column: int) -> QColor | None:
        if column == STATE:
            return self.theme.color(STATE_COLORS[row.state])
        return self.theme.color("muted") if COLUMNS[column].text(row) == NOTHING else None

    def _map_pixmap(self, row: FleetRow) -> QPixmap | None:
        if row.bins is None:
            return None
        cached = self._map_pixmaps.get(row.entry)
        if cached is None or cached[0] is not row.bins or cached[1:3] != (self.theme, self.ratio):
            cached = (row.bins, self.theme, self.ratio, map_pixmap(row.bins, self.theme, self.ratio))
            self._map_pixmaps[row.entry] = cached
        return cached[3]


class FleetProxy(QSortFilterProxyModel):
    """Sorts the engines and hides those that lack a search word. Unknown values sort last in both directions.

    Rows move only when `sort_rows` is called, not whenever a number changes.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._search_words: tuple[str, ...] = ()
        self.setDynamicSortFilter(False)

    def search(self, text: str) -> None:
        self._search_words = tuple(text.casefold().split())
        self.sort_rows()

    def sort_rows(self) -> None:
        self.invalidate()
        self.sort(self.sortColumn(), self.sortOrder())

    def row_at(self, position: int) -> FleetRow:
        return self._rows[self.mapToSource(self.index(position, 0)).row()]

    def filterAcceptsRow(self, source_row: int, source_parent: Index) -> bool:
        if not self._search_words:
            return True
        text = search_text(self._rows[source_row])
        return all(word in text for word in self._search_words)

    def lessThan(self, source_left: Index, source_right: Index) -> bool:
        column = source_left.column()
        left, right = (sort_key(self._rows[index.row()], column) for index in (source_left, source_right))
        if left is None or right is None:
            is_up = self.sortOrder() is Qt.SortOrder.AscendingOrder
            return (left is not None) == is_up and (left is None) != (right is None)
        return left < right

    @property
    def _rows(self) -> tuple[FleetRow, ...]:
        model = self.sourceModel()
        assert isinstance(model, FleetModel), "it sorts nothing else"
        return model.rows
