"""Dialog with the map of PyTorch's allocator, requested from the engine when the dialog opens and on demand."""

from __future__ import annotations

import itertools
from typing import Final

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import (
    QCheckBox,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QStackedWidget,
    QWidget,
)

from kvscope_app.session.session import Session
from kvscope_app.ui.number_text import seconds
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import empty_state, label, scroll_area
from kvscope_app.views.memory.segments.segment_bars import SegmentBars, state_color
from kvscope_app.views.memory.segments.segment_figures import STATE_TEXTS, as_tsv, figure_rows, omission_text
from kvscope_app.views.memory.stacked_bar import Swatch
from kvscope_telemetry.errors import KvscopeError, ProtocolError
from kvscope_telemetry.messages.commands import AllocatorMap, Failed, GetAllocatorMap, Reply
from kvscope_telemetry.mirror.allocator_map import State, TorchSegment, unpack_map

_FIRST_TAG: Final = 1 << 46
"""First request tag of this dialog. Other users of the same socket use lower tags."""
_SLOW_ANSWER_MS: Final = 10_000
NOT_IN_RECORDING: Final = "Recordings do not contain PyTorch memory segments; a running engine provides them"
NOT_REPORTED: Final = "This engine does not provide PyTorch memory segments"
_WAITING_TEXT: Final = "Waiting for the engine, which answers between two steps."
_tags = itertools.count(_FIRST_TAG)


def why_not(session: Session) -> str:
    """Return why the allocator's map cannot be requested, or "" if it can."""
    if session.provides_allocator_map:
        return ""
    return NOT_IN_RECORDING if session.timeline.is_file else NOT_REPORTED


class SegmentsSheet(Sheet):
    """Non-modal dialog. It shows the allocator's state at the time of the engine's reply, independent of the session's
    cursor.
    """

    def __init__(self, parent: QWidget, session: Session, theme: Theme) -> None:
        super().__init__("PyTorch memory segments", parent)
        self._session = session
        self._tag = -1
        self._segments: list[TorchSegment] = []
        self._values: dict[str, QLabel] = {}
        self.bars = SegmentBars()
        self.message = empty_state("")
        self.note = label("", "muted", wraps=True)
        self.reload, self.copy = QPushButton("Refresh"), QPushButton("Copy as text")
        self.reload.clicked.connect(self.request)
        self.copy.clicked.connect(self._copy)
        self.copy.setToolTip("One line per block, tab-separated")
        self.to_scale = QCheckBox("Lengths to scale")
        self.to_scale.setToolTip("Off: every segment has full width, so small ones stay visible")
        self.to_scale.setChecked(True)
        self.to_scale.toggled.connect(self.bars.set_to_scale)
        self._slow_timer = QTimer(self)
        self._slow_timer.setSingleShot(True)
        self._slow_timer.setInterval(_SLOW_ANSWER_MS)
        self._slow_timer.timeout.connect(lambda: self._show_message(_WAITING_TEXT))
        self._swatches = {state: Swatch() for state in State}
        self._figures = QGridLayout()
        self._figures.setHorizontalSpacing(22)
        self._figures.setVerticalSpacing(2)
        self._lay_out()
        self.apply_theme(theme)
        session.replies.connect(self._on_replies)
        self.resize_comfortably(900, 560)
        self.request()

    def request(self) -> None:
        self._tag = next(_tags)
        reason = why_not(self._session)
        try:
            if not reason and not self._session.send(GetAllocatorMap(tag=self._tag)):
                reason = "No engine is attached"
        except KvscopeError as error:
            reason = str(error)
        if reason:
            self._show_message(reason)
            return
        self.reload.setEnabled(False)
        self.note.setText("Asking the engine…")
        self._slow_timer.start()

    def apply_theme(self, theme: Theme) -> None:
        self.bars.apply_theme(theme)
        for state, swatch in self._swatches.items():
            swatch.set_color(state_color(state, theme).name())

    def value(self, name: str) -> str:
        return self._values[name].text()

    def _on_replies(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, AllocatorMap | Failed) and reply.tag == self._tag:
                self._on_reply(reply)

    def _on_reply(self, reply: AllocatorMap | Failed) -> None:
        if isinstance(reply, Failed):
            self._show_message(reply.reason)
            return
        try:
            segments = unpack_map(reply)
        except ProtocolError as error:
            self._show_message(str(error))
            return
        self._show(reply, segments)

    def _show(self, allocator_map: AllocatorMap, segments: list[TorchSegment]) -> None:
        if not segments:
            self._show_message("PyTorch holds no device memory")
            return
        self._segments = segments
        self._stop_waiting()
        for index, (name, value, meaning) in enumerate(figure_rows(allocator_map)):
            self._show_figure(index, name, value, meaning)
        source_text = (
            f"{allocator_map.device}, read in {seconds(allocator_map.took_ns / 1e9)}"
            if allocator_map.took_ns
            else allocator_map.device
        )
        self.note.setText("; ".join(filter(None, (source_text, omission_text(allocator_map, segments)))))
        self.bars.show_segments(segments)
        self.copy.setEnabled(True)
        self._stack.setCurrentIndex(1)

    def _show_message(self, text: str) -> None:
        self._stop_waiting()
        self._segments = []
        self.copy.setEnabled(False)
        self.note.setText("")
        self.message.setText(text[:1].upper() + text[1:])
        self._stack.setCurrentIndex(0)

    def _stop_waiting(self) -> None:
        self._slow_timer.stop()
        self.reload.setEnabled(True)

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(as_tsv(self._segments))

    def _show_figure(self, index: int, name: str, value: str, meaning: str) -> None:
        if name not in self._values:
            name_label, value_label = label(name, "muted"), label()
            value_label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
            for row, widget in enumerate((name_label, value_label)):
                widget.setToolTip(meaning)
                self._figures.addWidget(widget, row, index)
            self._values[name] = value_label
        self._values[name].setText(value)

    def _lay_out(self) -> None:
        scroll = scroll_area(self.bars)
        body = QWidget()
        self._stack = QStackedWidget()
        self._stack.addWidget(self.message)
        self._stack.addWidget(body)
        grid = QGridLayout(body)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setVerticalSpacing(12)
        grid.addLayout(self._figures, 0, 0, Qt.AlignmentFlag.AlignLeft)
        grid.addLayout(self._legend(), 1, 0)
        grid.addWidget(scroll, 2, 0)
        grid.setRowStretch(2, 1)
        self.column.addWidget(self._stack, 1)
        self.column.addWidget(self.note)
        self.copy.setEnabled(False)
        buttons = QWidget()
        row = QHBoxLayout(buttons)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self.reload)
        row.addWidget(self.copy)
        self.add_close(buttons)

    def _legend(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.setSpacing(7)
        for state, swatch in self._swatches.items():
            row.addWidget(swatch)
            row.addWidget(label(STATE_TEXTS[state], "muted"))
            row.addSpacing(9)
        row.addWidget(label("outlined: the largest cached block", "muted"))
        row.addStretch()
        row.addWidget(self.to_scale)
        return row
