"""View of devices: each GPU and the host with memory by process, figures and curves, and a table of processes.

Owns the card of each device. Shows the newest sample up to the shown time.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from PySide6.QtCore import (
    QModelIndex,
    QSize,
    QSortFilterProxyModel,
    Qt,
)
from PySide6.QtGui import QColor, QGuiApplication, QKeyEvent, QKeySequence
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFrame,
    QHeaderView,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.session.device_log import HOST, gpu_key, host_used_bytes
from kvscope_app.session.session import Session
from kvscope_app.ui.number_text import NOTHING, UNKNOWN, num_bytes
from kvscope_app.ui.table_text import as_tsv, selected_rows
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import empty_state, label, scroll_area
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.chart.chart_stack import ChartedView
from kvscope_app.views.device.charts import DeviceCharts
from kvscope_app.views.device.device_card import DeviceCard
from kvscope_app.views.device.device_figures import (
    gpu_figures,
    gpu_memory_line,
    gpu_state,
    gpu_title,
    host_figures,
    memory_line,
    no_gpu_text,
)
from kvscope_app.views.device.memory_users import ProcessRow, gpu_memory_users, host_memory_users, process_rows
from kvscope_app.views.device.process_color import process_color
from kvscope_app.views.table import Index, RowTable, TableHead, TableModel
from kvscope_telemetry.messages.devices import Devices, Gpu, Host

_HEAD: Final = TableHead(
    ("On", "PID", "Process", "Memory", "Cores"),
    (
        "The GPU, or the host's own memory",
        "Process ID; on a GPU as the driver knows it (in a container, the host's)",
        "",
        "On a GPU: as reported by the driver; on the host: resident memory",
        "Cores used; 1.0 is one core all the time",
    ),
    (1, 3, 4),
)
_SORT_ROLE: Final = Qt.ItemDataRole.UserRole
_MAX_TABLE_HEIGHT: Final = 320
_SWATCH: Final = 10
EMPTY_TEXT = (
    "No device data.\nkvscope's own engine reports its devices; for another engine, run `kvscope-engine "
    "sample` on its machine."
)


class DeviceView(ChartedView):
    title: ClassVar[str] = "Devices"
    object_name: ClassVar[str] = "devices"
    refresh_hz: ClassVar[float] = 4.0
    charts: DeviceCharts

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.cards: dict[str, DeviceCard] = {}
        self.note = label(look="muted", wraps=True)
        self.charts = DeviceCharts(session)
        self.processes = ProcessTable()
        self._shown: Devices | None = None
        self._lay_out()

    def refresh(self) -> None:
        devices = self.session.history.devices.newest
        if devices is None:
            self.stack.setCurrentIndex(0)
            return
        if devices is not self._shown:
            self._shown = devices
            self._show(devices)
        self.stack.setCurrentIndex(1)
        self.charts.refresh()

    def draw_all(self) -> None:
        self._shown = None
        self.refresh()
        self.charts.refresh_all()

    def became_visible(self) -> None:
        self.draw_all()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        for card in self.cards.values():
            card.apply_theme(theme)
        self.charts.apply_theme(theme)
        self.processes.apply_theme(theme)

    def _show(self, devices: Devices) -> None:
        keys = [gpu_key(gpu) for gpu in devices.gpus] + ([HOST] if devices.host is not None else [])
        if keys != list(self.cards):
            self._make_cards(keys)
        for gpu in devices.gpus:
            self._show_gpu(self.cards[gpu_key(gpu)], gpu, devices)
        if devices.host is not None:
            self._show_host(self.cards[HOST], devices.host)
        note = no_gpu_text(devices)
        self.note.setVisible(bool(note))
        self.note.setText(note)
        self.charts.show_devices([(gpu_key(gpu), f"GPU {gpu.index}") for gpu in devices.gpus])
        self.processes.rows.show_rows(process_rows(devices))

    def _show_gpu(self, card: DeviceCard, gpu: Gpu, devices: Devices) -> None:
        card.show_state(gpu_title(gpu, devices), *gpu_state(gpu))
        card.show_memory(gpu_memory_line(gpu), gpu_memory_users(gpu), gpu.memory_total_bytes)
        card.show_figures(gpu_figures(gpu))

    def _show_host(self, card: DeviceCard, host: Host) -> None:
        card.show_state(" · ".join(filter(None, ("Machine", host.name))), "", "muted")
        line = memory_line(host_used_bytes(host), host.memory_total_bytes)
        card.show_memory(line, host_memory_users(host), host.memory_total_bytes)
        card.show_figures(host_figures(host))

    def _make_cards(self, keys: list[str]) -> None:
        for card in self.cards.values():
            self._cards.removeWidget(card)
            card.hide()
            card.deleteLater()
        self.cards = {key: DeviceCard() for key in keys}
        for card in self.cards.values():
            card.apply_theme(self.theme)
            self._cards.addWidget(card)

    def _lay_out(self) -> None:
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(12, 10, 12, 12)
        column.setSpacing(10)
        cards = QWidget()
        self._cards = QVBoxLayout(cards)
        self._cards.setContentsMargins(0, 0, 0, 0)
        self._cards.setSpacing(12)
        column.addWidget(cards)
        column.addWidget(self.note)
        column.addWidget(self.charts)
        column.addWidget(label("Processes", "heading"))
        column.addWidget(self.processes)
        column.addStretch(1)
        scroll = scroll_area(body)
        self.charts.set_scroll_area(scroll)
        self.stack = QStackedLayout(self)
        self.stack.addWidget(empty_state(EMPTY_TEXT))
        self.stack.addWidget(scroll)


# Table of the processes on GPUs and on the host, which can be sorted and copied.
class ProcessModel(TableModel):
    table_head: ClassVar[TableHead] = _HEAD

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[ProcessRow] = []
        self.theme: Theme = DARK

    def show_rows(self, rows: list[ProcessRow]) -> None:
        """Replace the rows. The view keeps selection and scroll position if the processes are the same as before."""
        has_same_processes = [(row.device, row.pid) for row in rows] == [(row.device, row.pid) for row in self._rows]
        if not has_same_processes:
            self.beginResetModel()
        has_changed = rows != self._rows
        self._rows = rows
        if not has_same_processes:
            self.endResetModel()
        elif has_changed and rows:
            self.dataChanged.emit(self.index(0, 2), self.index(len(rows) - 1, 4))

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self._rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return _texts(row)[column]
        if role == _SORT_ROLE:
            return (row.device, row.pid, row.name.lower(), row.num_bytes or -1, row.cores or -1.0)[column]
        if role == Qt.ItemDataRole.DecorationRole and column == 2:
            return QColor(process_color(row.color_index, self.theme))
        return _HEAD.side(column) if role == Qt.ItemDataRole.TextAlignmentRole else None


class ProcessTable(RowTable):
    """Table of processes, in reported order until a header is clicked. As high as its rows, up to a limit."""

    def __init__(self) -> None:
        super().__init__("Processes", is_multi_select=True)
        self.rows = ProcessModel()
        self.rows.setParent(self)
        self._sort_model = QSortFilterProxyModel(self)
        self._sort_model.setSourceModel(self.rows)
        self._sort_model.setSortRole(_SORT_ROLE)
        self.setModel(self._sort_model)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setIconSize(QSize(scaled(_SWATCH), scaled(_SWATCH)))
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        header = self.horizontalHeader()
        for column in range(len(_HEAD)):
            mode = QHeaderView.ResizeMode.Stretch if column == 2 else QHeaderView.ResizeMode.ResizeToContents
            header.setSectionResizeMode(column, mode)
        header.setSortIndicator(-1, Qt.SortOrder.AscendingOrder)
        self.setSortingEnabled(True)
        self.rows.modelReset.connect(self._update_height)
        self._update_height()

    def apply_theme(self, theme: Theme) -> None:
        self.rows.theme = theme
        self.viewport().update()

    def minimumSizeHint(self) -> QSize:
        return QSize(60, 40)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            rows = selected_rows(self) or list(range(self.model().rowCount()))
            QGuiApplication.clipboard().setText(as_tsv(self, rows))
        else:
            super().keyPressEvent(event)

    def _update_height(self) -> None:
        rows = self.model().rowCount()
        height = self.horizontalHeader().sizeHint().height() + rows * self.verticalHeader().defaultSectionSize() + 4
        self.setFixedHeight(min(height, _MAX_TABLE_HEIGHT))


def _texts(row: ProcessRow) -> tuple[str, ...]:
    cores = NOTHING if row.cores is None else f"{row.cores:.2f}"
    return (row.device, f"{row.pid}", row.name or UNKNOWN, num_bytes(row.num_bytes), cores)
