"""Shows a memory plan: a bar per GPU with its parts, concurrent requests by length, and options that make more fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QScrollArea, QVBoxLayout, QWidget

from kvscope_app.ui.number_text import count, num_bytes, percent
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import label, number_label
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.views.memory.stacked_bar import BarSegment, StackedBar, Swatch
from kvscope_telemetry.messages.memory_plan import (
    MISSING,
    Change,
    InferenceAnswer,
    PlanAnswer,
    PlanPart,
    TrainingAnswer,
    whole_of,
)

_COLORS: Final = {
    "KV cache": 0,
    "weights": 6,
    "activations": 1,
    "gathered weights": 4,
    "logits and sampling": 3,
    "attention's partial results": 5,
    "graphs": 4,
    "recurrent states": 2,
    "optimizer states": 2,
    "gradients": 5,
    "temporary buffers": 3,
}
"""Colour of each part of the bar, as an index into the theme's curve colours. Other parts are grey.

The parts of a serving plan all have different colours, and so do the parts of a training plan.
"""
_GREY: Final = 7
_COMMA_GROUPS: Final = re.compile(r"(?<=\d),(?=\d{3})")
_SEPARATOR: Final = count(1000)[1:-3]


class PlanView(QScrollArea):
    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._page = QWidget()
        self.setWidgetResizable(True)
        self.setFrameShape(QScrollArea.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.show_message("")

    def show_message(self, text: str, style: str = "muted") -> None:
        column = self._new_column()
        column.addWidget(label(text, style, wraps=True))
        column.addStretch()

    def show_answer(self, plan: PlanAnswer) -> None:
        column = self._new_column()
        column.addWidget(_heading(f"{plan.architecture}, {_parameters_text(plan.num_parameters)}"))
        self._add_serving(column, plan.inference)
        if plan.training is not None:
            self._add_training(column, plan.training)
        column.addStretch()

    @property
    def shown_text(self) -> str:
        """All text that is shown, for screen readers and tests."""
        return "\n".join(each.text() for each in self._page.findChildren(QLabel))

    def _new_column(self) -> QVBoxLayout:
        page = self._page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(0, 0, 12, 0)
        column.setSpacing(10)
        self.setWidget(page)
        return column

    def _add_serving(self, column: QVBoxLayout, plan: InferenceAnswer) -> None:
        column.addWidget(label(_verdict(plan), "" if plan.holds_longest else "warning", wraps=True))
        for stage in plan.stages:
            last = stage.first_layer + stage.num_layers - 1
            if len(plan.stages) > 1:
                column.addWidget(label(f"Stage {stage.number + 1}: layers {stage.first_layer} to {last}", "muted"))
            self._add_parts(column, stage.parts, plan.gpu_bytes)
        if plan.fits:
            text = (
                f"{num_bytes(round(plan.kv_bytes_a_token))} of KV cache per token, "
                f"{count(plan.num_blocks)} blocks of {plan.block_size} tokens, {count(plan.num_tokens)} "
                "tokens in total"
            )
            column.addWidget(label(text, "muted", wraps=True))
            rows = [(count(capacity.num_tokens), count(capacity.num_requests)) for capacity in plan.rooms]
            column.addLayout(_grid(("Tokens per request", "Concurrent"), rows))
        self._add_changes(column, plan.changes)
        self._add_notes(column, plan.notes)

    def _add_training(self, column: QVBoxLayout, plan: TrainingAnswer) -> None:
        fits = "it fits" if plan.fits else "it does not fit"
        column.addSpacing(8)
        column.addWidget(_heading("Training"))
        text = f"{num_bytes(plan.peak_bytes)} at the worst moment ({plan.worst}): {fits}"
        column.addWidget(label(text, "" if plan.fits else "warning", wraps=True))
        self._add_parts(column, plan.parts, plan.gpu_bytes)
        self._add_changes(column, plan.changes)
        self._add_notes(column, plan.notes)

    def _add_notes(self, column: QVBoxLayout, notes: Sequence[str]) -> None:
        for note in notes:
            column.addWidget(label(_with_separators(note), "muted", wraps=True))

    def _add_parts(self, column: QVBoxLayout, parts: Sequence[PlanPart], gpu_bytes: int) -> None:
        bar, present_parts, total_bytes = (
            StackedBar(),
            [part for part in parts if part.name != MISSING],
            whole_of(parts, gpu_bytes),
        )
        bar.set_colors(self._theme.raised, self._theme.panel)
        bar.setAccessibleName("Memory breakdown")
        bar.show_segments(
            [
                BarSegment(part.num_bytes / total_bytes, self._color(part), f"{part.name}: {num_bytes(part.num_bytes)}")
                for part in present_parts
            ]
        )
        column.addWidget(bar)
        grid = QGridLayout()
        grid.setHorizontalSpacing(12)
        grid.setVerticalSpacing(3)
        grid.setColumnStretch(4, 1)
        total_label = label(f"of {num_bytes(total_bytes)}", "muted")
        total_label.setAlignment(Qt.AlignmentFlag.AlignRight)
        grid.addWidget(total_label, 0, 3)
        for row, part in enumerate(parts, start=1):
            swatch = Swatch()
            swatch.set_color(self._color(part))
            grid.addWidget(swatch, row, 0)
            grid.addWidget(label(part.name, "warning" if part.name == MISSING else ""), row, 1)
            grid.addWidget(number_label(num_bytes(part.num_bytes)), row, 2)
            grid.addWidget(number_label(percent(part.num_bytes / total_bytes, 0)), row, 3)
            grid.addWidget(_remark(part.how), row, 4)
        column.addLayout(grid)

    def _color(self, part: PlanPart) -> str:
        return self._theme.bad if part.name == MISSING else self._theme.series[_COLORS.get(part.name, _GREY)]

    def _add_changes(self, column: QVBoxLayout, changes: Sequence[Change]) -> None:
        if not changes:
            return
        column.addSpacing(4)
        column.addWidget(_heading("Options for more concurrent requests"))
        has_tokens = any(change.num_tokens for change in changes)
        titles = ("Option", "Tokens", "Concurrent max-length requests", "") if has_tokens else ("Option", "", "", "")
        rows = [
            (
                change.options,
                count(change.num_tokens) if has_tokens else ("fits" if change.fits else "does not fit"),
                count(change.num_requests) if has_tokens else "",
                change.note,
            )
            for change in changes
        ]
        column.addLayout(_grid(titles, rows))


def _grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> QGridLayout:
    grid = QGridLayout()
    grid.setHorizontalSpacing(20)
    grid.setVerticalSpacing(3)
    grid.setColumnStretch(len(titles) if len(titles) == 2 else 3, 1)
    for column, title in enumerate(titles):
        heading = label(title, "muted")
        if 0 < column < 3:
            heading.setAlignment(Qt.AlignmentFlag.AlignRight)
        grid.addWidget(heading, 0, column)
    for row, cells in enumerate(rows, start=1):
        for column, cell in enumerate(cells):
            is_number = len(titles) == 2 or 0 < column < 3
            remark = _remark(cell) if column else label(cell)
            grid.addWidget(number_label(cell) if is_number else remark, row, column)
    return grid


def _remark(text: str) -> QLabel:
    """Return a label that elides its text if there is too little space."""
    elided_label = ElidedLabel(_with_separators(text))
    elided_label.setProperty("look", "muted")
    return elided_label


def _with_separators(text: str) -> str:
    """Return the planner's text with the window's digit separators instead of commas."""
    return _COMMA_GROUPS.sub(_SEPARATOR, text)


def _heading(text: str) -> QLabel:
    return label(text, "heading")


def _verdict(plan: InferenceAnswer) -> str:
    gpus = f"{plan.num_gpus} GPUs of {num_bytes(plan.gpu_bytes)}" if plan.num_gpus > 1 else num_bytes(plan.gpu_bytes)
    share = f"{gpus}, of which {num_bytes(plan.allowed_bytes)} usable"
    if not plan.fits:
        return f"Does not fit in {share}."
    if not plan.holds_longest:
        return f"Fits in {share}, but without room for one request of {count(plan.max_model_len)} tokens."
    return f"Fits in {share}."


def _parameters_text(number: int) -> str:
    return f"{number / 1e9:.2f} billion parameters" if number >= 1e8 else f"{number / 1e6:.1f} million parameters"
