"""Center of the window before an engine is connected: progress, and a preview of the views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QAction, QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.ui.banner import BannerChoice
from kvscope_app.ui.fonts import sans
from kvscope_app.ui.icons import pixmap
from kvscope_app.ui.number_text import count, num_bytes
from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import show_choices
from kvscope_app.ui.zoom import scaled
from kvscope_telemetry.messages.telemetry import Progress

_VIEWS: Final = (
    ("map", "Page map", "each cell is one KV cache block: owner, fill, sharing"),
    ("chat", "Console", "type a prompt and watch its blocks appear as the answer streams"),
    ("chart", "Throughput and memory", "tokens per second, latencies, and where memory goes"),
    ("requests", "Requests", "state, tokens, blocks and speed of each; select one to highlight it in all views"),
)
_STAGES: Final = {
    "compile": "Compiling for this processor (once; the next start is fast)",
    "download": "Downloading the model",
    "convert": "Converting the model (once; the next start is fast)",
    "wait": "Waiting for the GPU",
    "load": "Loading the model",
    "warm up": "Warming up",
    "ready": "Ready",
}
_STEPS: Final = 1000
_MAX_CARD_WIDTH: Final = 560
_OUTER_MARGIN, _INNER_MARGIN = 24, 30
"""Horizontal margins outside and inside the card, in pixels."""


class Welcome(QWidget):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.title, self._detail = PlainLabel("Starting the engine"), PlainLabel()
        self._progress_bar = QProgressBar()
        self._progress_bar.setTextVisible(False)
        self._icon_labels = [PlainLabel() for _ in _VIEWS]
        self._logo = PlainLabel()
        self.card, self.steps_list = QFrame(), QWidget()
        self._column, self._grid = QVBoxLayout(self.card), self._make_feature_list()
        self._offers = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._choices = QHBoxLayout()
        self._build()
        self.show_waiting("Starting the engine", "")

    def apply_theme(self, theme: Theme) -> None:
        self._logo.setPixmap(pixmap("kvscope", "#000001", scaled(44)))
        for sign, (name, _, _) in zip(self._icon_labels, _VIEWS, strict=True):
            sign.setPixmap(pixmap(name, theme.accent, scaled(20)))

    def add_offer(self, action: QAction) -> None:
        button = QPushButton(action.text())
        button.setMinimumWidth(1)  # a small window stays small
        button.setToolTip(action.toolTip())
        button.clicked.connect(action.trigger)
        self._offers.insertWidget(self._offers.count() - 1, button)

    def show_waiting(self, title: str, detail: str, choices: Sequence[BannerChoice] = ()) -> None:
        """Show progress of unknown duration. `choices` are alternatives to waiting, the most common one first."""
        self._show_choices(choices)
        self.title.setText(title)
        self._detail.setText(detail)
        self._progress_bar.setRange(0, 0)
        self._progress_bar.show()
        self._avoid_clipping()

    def show_ended(self, title: str, detail: str) -> None:
        self._show_choices(())
        self.title.setText(title)
        self._detail.setText(detail)
        self._progress_bar.hide()
        self._avoid_clipping()

    def show_progress(self, progress: Progress) -> None:
        self._show_choices(())
        self.title.setText(_STAGES.get(progress.stage, progress.stage.capitalize()))
        self._detail.setText(progress_text(progress))
        self._progress_bar.setRange(0, _STEPS if progress.total else 0)
        self._progress_bar.setValue(_STEPS * progress.done // progress.total if progress.total else 0)
        self._progress_bar.show()
        self._avoid_clipping()

    def minimumSizeHint(self) -> QSize:
        """Return a small size, so that a small window can stay small. Contents that do not fit are hidden."""
        return QSize(scaled(240), scaled(150))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._avoid_clipping()

    def _show_choices(self, choices: Sequence[BannerChoice]) -> None:
        show_choices(self._choices, choices)
        if choices:
            self._choices.addStretch(1)

    def _avoid_clipping(self) -> None:
        """Stack the buttons if the card is narrow, and hide the list of views if it is low."""
        width = min(self.width() - 2 * _OUTER_MARGIN, _MAX_CARD_WIDTH)
        is_narrow = self._buttons_width() > width - 2 * _INNER_MARGIN
        directions = QBoxLayout.Direction
        self._offers.setDirection(directions.TopToBottom if is_narrow else directions.LeftToRight)
        self.steps_list.hide()
        self._column.invalidate()
        height_without_list = self._column.heightForWidth(width) + self._column.spacing()
        list_height = self._grid.heightForWidth(width - 2 * _INNER_MARGIN)
        self.steps_list.setVisible(height_without_list + list_height <= self.height())

    def _buttons_width(self) -> int:
        buttons = self.card.findChildren(QPushButton)
        return sum(button.sizeHint().width() + self._offers.spacing() for button in buttons)

    def _build(self) -> None:
        card = self.card
        card.setProperty("look", "card")
        card.setMaximumWidth(_MAX_CARD_WIDTH)
        column = self._column
        column.setContentsMargins(_INNER_MARGIN, 24, _INNER_MARGIN, 24)
        column.setSpacing(10)
        self.title.setFont(sans(1.35))
        self.title.setProperty("look", "heading")
        self.title.setWordWrap(True)
        self._detail.setProperty("look", "muted")
        self._detail.setWordWrap(True)
        heading_row = QHBoxLayout()
        heading_row.setSpacing(16)
        heading_texts = QVBoxLayout()
        heading_texts.setSpacing(3)
        heading_texts.addWidget(self.title)
        heading_texts.addWidget(self._detail)
        heading_row.addWidget(self._logo, 0, Qt.AlignmentFlag.AlignTop)
        heading_row.addLayout(heading_texts, 1)
        column.addLayout(heading_row)
        column.addSpacing(4)
        column.addWidget(self._progress_bar)
        column.addLayout(self._choices)
        column.addSpacing(14)
        self.steps_list.setLayout(self._grid)
        column.addWidget(self.steps_list)
        column.addSpacing(12)
        self._offers.setSpacing(8)
        self._offers.addStretch(1)
        column.addLayout(self._offers)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(_OUTER_MARGIN, 0, _OUTER_MARGIN, 0)
        outer.addStretch(2)
        row = QHBoxLayout()
        row.addWidget(card, 1)
        outer.addLayout(row)
        outer.addStretch(3)

    def _make_feature_list(self) -> QGridLayout:
        grid = QGridLayout()
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(14)
        grid.setVerticalSpacing(12)
        grid.setColumnStretch(1, 1)
        for row, (sign, (_, name, description)) in enumerate(zip(self._icon_labels, _VIEWS, strict=True)):
            text = QLabel(f"<b>{name}</b>: {description}.")
            text.setWordWrap(True)
            grid.addWidget(sign, row, 0, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(text, row, 1)
        return grid


def progress_text(progress: Progress) -> str:
    """Return the progress as text, for example `model.gguf: 12.3 MiB of 98.1 MiB`."""
    if progress.unit == "bytes":
        done, total = num_bytes(progress.done), num_bytes(progress.total)
    else:
        done, total = count(progress.done), f"{count(progress.total)} {progress.unit}".strip()
    amount = f"{done} of {total}" if progress.total else done if progress.done else ""
    return ": ".join(part for part in (progress.detail, amount) if part)
