"""The fleet's window: a search, the table, and what is to be said of the list. A row opens in a window of its own.

Owns its widgets. Who reads the engines and the list is its keeper's; opening is the desktop's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QSize, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QKeySequence, QShortcut, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QMainWindow, QPushButton, QStackedLayout, QVBoxLayout, QWidget

from kvscope_app.fleet.order_box import OrderBox
from kvscope_app.fleet.table import FleetTable
from kvscope_app.fleet.words import counts_text, list_text
from kvscope_app.look.makers import empty_state, label
from kvscope_app.look.theme import Theme
from kvscope_app.look.theming.theme_keeper import ThemeKeeper
from kvscope_app.window.sheets.attach_sheet import AttachSheet
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.entries import FleetEntry
from kvscope_telemetry.fleet.fleet import Fleet
from kvscope_telemetry.fleet.list_reader import ListReader

REFRESH_MS: Final = 500
SETTLE_S: Final = 2.0
"""Rows take their new places so often: those under the pointer should not run away."""
MAX_OPENED: Final = 8
"""Windows at once."""
NOTHING_LISTED: Final = "There is no engine on the list yet."
NOTHING_KNOWN: Final = (
    "No engine is attached or remembered yet. Add engine… watches one; kvscope fleet --file watches a list."
)
NOTHING_FOUND: Final = "No engine has all of these words."
_SIZE: Final = QSize(1320, 720)


class FleetWindow(QMainWindow):
    """Shows `fleet`; `attach` opens one of its engines, `add` puts one beside its list. `reader` reads the list, None
    where there is none to read."""

    closing = Signal(object)
    """The window itself, for the last time."""

    def __init__(
        self,
        fleet: Fleet,
        themes: ThemeKeeper,
        attach: Callable[[Address], object],
        reader: ListReader | None,
        add: Callable[[FleetEntry], None],
    ) -> None:
        super().__init__()
        self.fleet, self._themes, self._attach, self._reader, self._add = fleet, themes, attach, reader, add
        self.trouble = ""
        """Of a list that nobody reads again."""
        self._settled_s = 0.0
        self._waits_for_rows = True  # the keys are the table's as soon as there is one
        self._complaint = ""
        self.setWindowTitle("Fleet – kvscope")
        self.search = QLineEdit()
        self.search.setPlaceholderText("Search names, addresses, models, versions and states")
        self.search.setClearButtonEnabled(True)
        self.search.setAccessibleName("Search engines")
        self.table = FleetTable()
        self.order = OrderBox(self.table.horizontalHeader())
        self.counts = label("", elastic=True)
        self.told = label("", "muted", wraps=True)
        self.open_button = QPushButton("Open")
        self.add_button = QPushButton("Add engine…")
        self.again = QPushButton("Read the list again")
        self._empty = empty_state(NOTHING_LISTED)
        self._middle = QStackedLayout()
        self._timer = QTimer(self, interval=REFRESH_MS)
        self._lay_out()
        self._connect()
        self._apply_theme(themes.theme)
        self.resize(_SIZE.boundedTo(self.screen().availableGeometry().size() * 0.94))
        self.refresh()

    def refresh(self) -> None:
        """Show what is known now."""
        now_s = time.monotonic()
        settles = now_s - self._settled_s >= SETTLE_S
        if settles:
            self._settled_s = now_s
        rows = self.fleet.rows
        self.table.show_rows(rows, settles=settles or len(rows) != len(self.table.fleet.rows))
        self.counts.setText(counts_text(rows, self.table.proxy.rowCount()))
        self._show_told()
        self._show_middle()
        self._show_buttons()

    def open_chosen(self) -> None:
        """Each in a window of its own."""
        self._complaint = ""
        for row in self.table.chosen[:MAX_OPENED]:
            try:
                self._attach(row.entry.address)
            except BadInput as error:
                self._complaint = str(error)
        self._show_told()

    def ask_engine(self) -> None:
        """For the address of one more. It is remembered, as when it is attached."""

        def add(address: Address) -> None:
            self._add(FleetEntry(address, sheet.fields.name.text().strip()))

        sheet = AttachSheet(self, add, "Add engine", "Add")
        sheet.show()

    # Qt's side

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._show_middle()

    def closeEvent(self, event: QCloseEvent) -> None:
        self._timer.stop()
        self._themes.changed.disconnect(self._apply_theme)
        self.closing.emit(self)
        super().closeEvent(event)

    # private

    def _show_told(self) -> None:
        listed = "" if self._reader is None else list_text(self._reader.name, self._reader.told, time.monotonic_ns())
        self.told.setText("\n".join(filter(None, (self._complaint, self.fleet.failure, self.trouble, listed))))

    def _show_middle(self) -> None:
        if self.fleet.rows:
            self._empty.setText(NOTHING_FOUND)
        else:
            self._empty.setText(NOTHING_KNOWN if self._reader is None else NOTHING_LISTED)
        self._middle.setCurrentIndex(0 if self.table.proxy.rowCount() else 1)
        if self._waits_for_rows and self.table.isVisible():
            self._waits_for_rows = False
            self.table.setFocus()

    def _show_buttons(self) -> None:
        self.open_button.setEnabled(self.table.selectionModel().hasSelection())

    def _search(self, text: str) -> None:
        self.table.proxy.search(text)
        self.refresh()

    def _escape(self) -> None:
        """Out of the search, and then back to all."""
        if self.search.text():
            self.search.clear()
        self.table.setFocus()

    def _to_table(self) -> None:
        self.table.setFocus()
        if not self.table.selectionModel().hasSelection():
            self.table.selectRow(0)

    def _read_again(self) -> None:
        if self._reader is not None:
            self._reader.read_now()

    def _connect(self) -> None:
        self._timer.timeout.connect(self.refresh)
        self._timer.start()
        self.search.textChanged.connect(self._search)
        self.search.returnPressed.connect(self._to_table)
        self.table.open_wanted.connect(self.open_chosen)
        self.table.selectionModel().selectionChanged.connect(self._show_buttons)
        self.open_button.clicked.connect(self.open_chosen)
        self.add_button.clicked.connect(self.ask_engine)
        self.again.clicked.connect(self._read_again)
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
        body, middle, head, foot = QWidget(), QWidget(), QHBoxLayout(), QHBoxLayout()
        body.setObjectName("body")
        middle.setLayout(self._middle)
        self._middle.addWidget(self.table)
        self._middle.addWidget(self._empty)
        head.addWidget(self.search, 1)
        head.addWidget(self.order)
        self.open_button.setProperty("look", "primary")
        self.open_button.setToolTip("Watch it in a window of its own (Enter)")
        self.add_button.setToolTip("Watch one more engine, and remember it")
        self.again.setToolTip("Now, not only when it is time (F5)")
        self.again.setVisible(self._reader is not None)
        foot.addWidget(self.told, 1)
        foot.addWidget(self.again, 0, Qt.AlignmentFlag.AlignBottom)
        foot.addWidget(self.add_button, 0, Qt.AlignmentFlag.AlignBottom)
        foot.addWidget(self.open_button, 0, Qt.AlignmentFlag.AlignBottom)
        column = QVBoxLayout(body)
        column.setContentsMargins(12, 12, 12, 12)
        column.addLayout(head)
        column.addWidget(self.counts)
        column.addWidget(middle, 1)
        column.addLayout(foot)
        self.setCentralWidget(body)
