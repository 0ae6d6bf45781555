"""Devices: each GPU and the machine itself, whose their memory is, their figures and curves, and the processes.

Owns which card is of which device. Draws what the newest sample up to the shown moment says.
"""

from __future__ import annotations

from typing import ClassVar

from PySide6.QtCore import QSettings
from PySide6.QtWidgets import QFrame, QScrollArea, QStackedLayout, QVBoxLayout, QWidget

from kvscope_app.look.makers import empty_state, label
from kvscope_app.look.theme import Theme
from kvscope_app.session.device_log import HOST, gpu_key, host_taken_bytes
from kvscope_app.session.session import Session
from kvscope_app.views.base import View
from kvscope_app.views.device.card import Card
from kvscope_app.views.device.charts import DeviceCharts
from kvscope_app.views.device.device_words import (
    gpu_figures,
    gpu_memory_line,
    gpu_state,
    gpu_title,
    host_figures,
    memory_line,
    no_gpu_words,
)
from kvscope_app.views.device.memory_parts import gpu_pieces, host_pieces, process_rows
from kvscope_app.views.device.process_table import ProcessTable
from kvscope_telemetry.messages.devices import Devices, Gpu, Host

EMPTY_TEXT = (
    "Nothing is told of devices.\nAn engine of this version tells of its own; beside another, "
    "`kvscope-engine sample` does on its machine."
)


class DeviceView(View):
    """A card a GPU, one of the host, the charts and the table of processes."""

    title: ClassVar[str] = "Devices"
    object_name: ClassVar[str] = "devices"
    refresh_hz: ClassVar[float] = 4.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.cards: dict[str, Card] = {}
        self.note = label(look="muted", wraps=True)
        self.charts = DeviceCharts(session)
        self.processes = ProcessTable()
        self._shown: Devices | None = None
        self._lay_out()

    def refresh(self) -> None:
        devices = self.session.history.devices.newest
        if devices is None:
            self._stack.setCurrentIndex(0)
            return
        if devices is not self._shown:
            self._shown = devices
            self._show(devices)
        self._stack.setCurrentIndex(1)
        self.charts.refresh()

    def draw_all(self) -> None:
        self._shown = None
        self.refresh()
        self.charts.refresh_all()

    def came_in_sight(self) -> None:
        self.draw_all()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        for card in self.cards.values():
            card.apply_theme(theme)
        self.charts.apply_theme(theme)
        self.processes.apply_theme(theme)

    def recall(self, settings: QSettings) -> None:
        self.charts.recall(settings)

    def remember(self, settings: QSettings) -> None:
        self.charts.remember(settings)

    def show_range(self, begin_ns: int, end_ns: int) -> None:
        offset_ns = self.session.history.wall_ns(0)
        self.charts.look_back((begin_ns - offset_ns) / 1e9, (end_ns - offset_ns) / 1e9)

    def _show(self, devices: Devices) -> None:
        told = [gpu_key(gpu) for gpu in devices.gpus] + ([HOST] if devices.host is not None else [])
        if told != list(self.cards):
            self._make_cards(told)
        for gpu in devices.gpus:
            self._show_gpu(self.cards[gpu_key(gpu)], gpu, devices)
        if devices.host is not None:
            self._show_host(self.cards[HOST], devices.host)
        note = no_gpu_words(devices)
        self.note.setVisible(bool(note))
        self.note.setText(note)
        self.charts.show_devices([(gpu_key(gpu), f"GPU {gpu.index}") for gpu in devices.gpus])
        self.processes.rows.show_rows(process_rows(devices))

    def _show_gpu(self, card: Card, gpu: Gpu, devices: Devices) -> None:
        card.show_state(gpu_title(gpu, devices), *gpu_state(gpu))
        card.show_memory(gpu_memory_line(gpu), gpu_pieces(gpu), gpu.memory_total_bytes)
        card.show_figures(gpu_figures(gpu))

    def _show_host(self, card: Card, host: Host) -> None:
        card.show_state(" · ".join(filter(None, ("Machine", host.name))), "", "muted")
        line = memory_line(host_taken_bytes(host), host.memory_total_bytes)
        card.show_memory(line, host_pieces(host), host.memory_total_bytes)
        card.show_figures(host_figures(host))

    def _make_cards(self, keys: list[str]) -> None:
        for card in self.cards.values():
            self._cards.removeWidget(card)
            card.hide()
            card.deleteLater()
        self.cards = {key: Card() for key in keys}
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
        scroll = QScrollArea()
        self.charts.lie_in(scroll)
        self.charts.chosen.connect(lambda x: self.session.go_to(round(x * 1e9) + self.session.history.wall_ns(0)))
        scroll.setWidget(body)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(empty_state(EMPTY_TEXT))
        self._stack.addWidget(scroll)
