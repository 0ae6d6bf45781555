"""Asks how much of the past a live session keeps on the disk; what is chosen holds at once and from then on."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFormLayout, QSpinBox, QVBoxLayout

from kvscope_app.look.makers import inset, label
from kvscope_app.look.number_text import num_bytes
from kvscope_app.look.zoom import scaled
from kvscope_app.session.kept.rings import rings_folder
from kvscope_app.settings.settings import MEGABYTES, MINUTES
from kvscope_app.window.window_body import WindowBody


class KeptDialog(QDialog):
    """Of one window; its settings are those of all."""

    def __init__(self, window: WindowBody) -> None:
        super().__init__(window)
        self._kept, self._settings = window.session.kept, window.themes.settings
        self.setWindowTitle("History length")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        chosen = self._settings.values
        self.minutes = _number(chosen.timeline_minutes, MINUTES, " minutes", "Minutes of history")
        self.megabytes = _number(chosen.timeline_megabytes, MEGABYTES, " MiB", "Size of the history in MiB")
        form = QFormLayout()
        form.addRow("The last", self.minutes)
        form.addRow("but at most", self.megabytes)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Ok | QDialogButtonBox.StandardButton.Cancel)
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(22, 20, 22, 18)
        column.setSpacing(12)
        column.addLayout(form)
        column.addWidget(label(self._facts(), "muted", wraps=True))
        column.addWidget(buttons)
        self.setMinimumWidth(scaled(400))

    def accept(self) -> None:
        """Keep so much from now on."""
        minutes, megabytes = self.minutes.value(), self.megabytes.value()
        self._settings.change(timeline_minutes=minutes, timeline_megabytes=megabytes)
        if self._kept is not None:
            self._kept.ring.set_bounds(max_bytes=megabytes << 20, max_seconds=minutes * 60.0)
        super().accept()

    def _facts(self) -> str:
        where = f"Readable by you alone, deleted when the window is closed: {rings_folder()}"
        if self._kept is None:
            return where
        around = self._kept.range_ns
        seconds = 0 if around is None else (around[1] - around[0]) / 1e9
        now = f"Now: {seconds / 60:.1f} minutes, {num_bytes(self._kept.ring.num_bytes)}."
        return f"{now} {self._kept.failure or where}"


def _number(value: int, accepted: tuple[int, int, int], suffix: str, name: str) -> QSpinBox:
    box = QSpinBox()
    inset(box)
    box.setRange(accepted[0], accepted[2])
    box.setValue(value)
    box.setSuffix(suffix)
    box.setAccessibleName(name)
    return box
