"""Dialogs about the history on disk: how many minutes to retain, and how many of them to save."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFormLayout, QLayout, QVBoxLayout, QWidget

from kvscope_app.session.recording.rings import rings_folder
from kvscope_app.session_window import SessionWindow
from kvscope_app.settings.settings import MEGABYTES, MINUTES
from kvscope_app.ui.number_fields import NumberBox, WholeNumberBox
from kvscope_app.ui.number_text import num_bytes
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.zoom import scaled


class HistoryLengthDialog(QDialog):
    """Sets the length of the history: immediately in this window, and for windows opened later."""

    def __init__(self, window: SessionWindow) -> None:
        super().__init__(window)
        self._disk_history, self._settings = window.session.disk_history, window.themes.settings
        self.setWindowTitle("History length")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        settings = self._settings.values
        self.minutes = _number(settings.timeline_minutes, MINUTES, " minutes", "Minutes of history")
        self.megabytes = _number(settings.timeline_megabytes, MEGABYTES, " MiB", "Size of the history in MiB")
        form = QFormLayout()
        form.addRow("The last", self.minutes)
        form.addRow("but at most", self.megabytes)
        _lay_out(self, form, label(self._facts_text(), "muted", wraps=True))
        self.setMinimumWidth(scaled(400))

    def accept(self) -> None:
        minutes, megabytes = self.minutes.value(), self.megabytes.value()
        self._settings.change(timeline_minutes=minutes, timeline_megabytes=megabytes)
        if self._disk_history is not None:
            self._disk_history.ring.set_bounds(max_bytes=megabytes << 20, max_seconds=minutes * 60.0)
        super().accept()

    def _facts_text(self) -> str:
        location = f"Readable by you alone, deleted when the window is closed: {rings_folder()}"
        if self._disk_history is None:
            return location
        range_ns = self._disk_history.range_ns
        seconds = 0 if range_ns is None else (range_ns[1] - range_ns[0]) / 1e9
        current = f"Now: {seconds / 60:.1f} minutes, {num_bytes(self._disk_history.ring.num_bytes)}."
        return f"{current} {self._disk_history.failure or location}"


class SaveHistoryDialog(QDialog):
    chosen = Signal(float)
    """Emitted with the number of minutes to save when the user accepts the dialog."""

    def __init__(self, parent: QWidget, question: str, proposed: float, available: float) -> None:
        super().__init__(parent)
        self.setWindowTitle("Save recent history")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.minutes = NumberBox()
        self.minutes.setDecimals(1)
        self.minutes.setRange(0.1, max(available, 0.1))
        self.minutes.setValue(proposed)
        self.minutes.setSuffix(" minutes")
        self.minutes.setAccessibleName("Minutes to save")
        self.minutes.selectAll()
        _lay_out(self, label(question, wraps=True), self.minutes)
        self.setMinimumWidth(scaled(360))

    def accept(self) -> None:
        self.chosen.emit(self.minutes.value())
        super().accept()


def _lay_out(dialog: QDialog, *items: QWidget | QLayout) -> None:
    column = QVBoxLayout(dialog)
    column.setContentsMargins(22, 20, 22, 18)
    column.setSpacing(12)
    for part in items:
        if isinstance(part, QLayout):
            column.addLayout(part)
        else:
            column.addWidget(part)
    buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Ok | QDialogButtonBox.StandardButton.Cancel)
    buttons.accepted.connect(dialog.accept)
    buttons.rejected.connect(dialog.reject)
    column.addWidget(buttons)


def _number(value: int, limits: tuple[int, int, int], suffix: str, name: str) -> WholeNumberBox:
    box = WholeNumberBox()
    box.setRange(limits[0], limits[2])
    box.setValue(value)
    box.setSuffix(suffix)
    box.setAccessibleName(name)
    return box
