"""View of the load generator: its settings, a start button, and counts of requests."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, Final

import msgspec
from PySide6.QtCore import QSettings, QSignalBlocker
from PySide6.QtWidgets import (
    QComboBox,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QPushButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.load_generator.generator import LoadGenerator
from kvscope_app.load_generator.load_settings import (
    MAX_CONCURRENCY,
    MAX_OUTPUT_TOKENS,
    MAX_RATE,
    LoadSettings,
    Mix,
    Pace,
)
from kvscope_app.session.session import Session
from kvscope_app.setting_names import LOAD
from kvscope_app.ui.number_fields import NumberBox, WholeNumberBox
from kvscope_app.ui.number_text import count
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import label, number_label, set_look
from kvscope_app.views.base import View
from kvscope_app.views.capability_messages import why_no_prompts
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.source import SourceState

_COUNTS = ("Sent", "Unfinished", "Finished", "Aborted", "Refused", "Lost", "Tokens")
NO_ADAPTER: Final = "None"
ALL_ADAPTERS: Final = "Mixed: none and each adapter"
_MIN_CHARACTERS = 4
_MIN_FIELD_WIDTH = 72
_OPERATORS_ONLY = "Operators only: you are a viewer at this engine"
_LOADABLE_STATES = (SourceState.LIVE, SourceState.PAUSED, SourceState.STUCK, SourceState.STALE)


class LoadView(View):
    title: ClassVar[str] = "Load"
    object_name: ClassVar[str] = "load"
    refresh_hz: ClassVar[float] = 4.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.generator = LoadGenerator(session, self)
        self.pace, self.mix = _combo_box([p.value for p in Pace], "Load"), _combo_box([m.value for m in Mix], "Prompts")
        self.mix.setCurrentText(LoadSettings().mix.value)
        self.adapter = _combo_box([NO_ADAPTER], "LoRA adapter")
        self._adapter_name = label("Adapter", "muted")
        self._adapters: tuple[str, ...] = ()
        concurrency = LoadSettings().concurrency
        self.concurrency = _number_box(1, MAX_CONCURRENCY, concurrency, " requests", "Concurrent requests")
        self.rate = NumberBox()
        self.rate.setRange(0.1, MAX_RATE)
        self.rate.setDecimals(1)
        self.rate.setValue(LoadSettings().rate)
        self.rate.setSuffix(" req/s")
        self.rate.setMinimumWidth(_MIN_FIELD_WIDTH)
        self.rate.setAccessibleName("Requests per second")
        self.rate.hide()  # before the layout: a hidden page keeps the width it had with both fields
        self.min_output = _number_box(
            1, MAX_OUTPUT_TOKENS, LoadSettings().min_output_tokens, "", "Minimum output tokens"
        )
        self.max_output = _number_box(
            1, MAX_OUTPUT_TOKENS, LoadSettings().max_output_tokens, "", "Maximum output tokens"
        )
        self.button = QPushButton("Start")
        self.message = label(wraps=True)
        self.counts = {name: number_label("0") for name in _COUNTS}
        self._lay_out()
        self._connect()
        self.refresh()

    def settings(self) -> LoadSettings:
        """Return the settings in the fields. Raises BadInput if they contradict each other."""
        return LoadSettings(
            pace=Pace(self.pace.currentText()),
            concurrency=self.concurrency.value(),
            rate=self.rate.value(),
            mix=Mix(self.mix.currentText()),
            min_output_tokens=self.min_output.value(),
            max_output_tokens=self.max_output.value(),
            adapters=self._chosen_adapters(),
        )

    def restore_settings(self, settings: QSettings) -> None:
        encoded = settings.value(LOAD)
        if not isinstance(encoded, str):
            return
        try:
            saved = msgspec.json.decode(encoded, type=LoadSettings)
        except (BadInput, ValueError):  # damaged, or of a version with other limits
            return
        self.pace.setCurrentText(saved.pace)
        self.mix.setCurrentText(saved.mix)
        self.concurrency.setValue(saved.concurrency)
        self.rate.setValue(saved.rate)
        self.min_output.setValue(saved.min_output_tokens)
        self.max_output.setValue(saved.max_output_tokens)

    def save_settings(self, settings: QSettings) -> None:
        with suppress(BadInput):  # contradictory fields are not saved
            saved = replace(self.settings(), adapters=LoadSettings().adapters)  # adapters depend on the engine
            settings.setValue(LOAD, msgspec.json.encode(saved).decode())

    def _chosen_adapters(self) -> tuple[str, ...]:
        chosen = self.adapter.currentData()
        if self.adapter.currentIndex() == 1:
            return ("", *self._adapters)
        return (chosen or "",)

    def _update_adapters(self) -> None:
        names = tuple(each.name for each in self.session.status.adapters or ())
        for widget in (self.adapter, self._adapter_name):
            widget.setVisible(bool(names))
        if names == self._adapters:
            return
        chosen_before, self._adapters = self.adapter.currentText(), names
        with QSignalBlocker(self.adapter):
            self.adapter.clear()
            self.adapter.addItem(NO_ADAPTER, "")
            if names:
                self.adapter.addItem(ALL_ADAPTERS, "")
            for name in names:
                self.adapter.addItem(name, name)
            self.adapter.setCurrentIndex(max(0, self.adapter.findText(chosen_before)))
        self._on_changed()

    def refresh(self) -> None:
        self._update_adapters()
        generator, counts = self.generator, self.generator.counts
        values = (
            counts.sent,
            generator.num_unfinished,
            counts.finished,
            counts.aborted,
            counts.refused,
            counts.lost,
            counts.tokens,
        )
        for name, value in zip(_COUNTS, values, strict=True):
            self.counts[name].setText(count(value))
        self.message.setText(generator.message or self._hint())
        self._show_button()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self._color_message()

    def toggle(self) -> None:
        """Start the load, or stop it and abort its requests. Does nothing while requests are being aborted."""
        if self.generator.is_running:
            self.generator.stop()
            return
        if self.generator.is_stopping:
            return
        self.session.selection.select_request(None)  # so that the map shows all requests equally
        try:
            self.generator.start(self.settings())
        except BadInput as error:
            self.generator.message = str(error)
        self.refresh()

    def _hint(self) -> str:
        if self.generator.is_running:
            return (
                "Watch the page map and the waiting requests. For more memory pressure, use long prompts "
                "or more concurrent requests. When no block is free, a request is preempted: its blocks "
                "are recomputed later, or swapped to a lower tier."
            )
        if self.generator.is_stopping:
            return "Waiting for the engine to abort them…"
        return "Sends sample prompts until you stop it. Stop aborts its requests."

    def _show_button(self) -> None:
        is_running, is_stopping = self.generator.is_running, self.generator.is_stopping
        self.button.setText("Stop" if is_running else "Stopping…" if is_stopping else "Start load")
        can_start = self.session.status.state in _LOADABLE_STATES and not self._why_not()
        # Enabled while stopping: disabling the button that was clicked would move the focus to another dock.
        self.button.setEnabled(is_running or is_stopping or can_start)
        self.button.setToolTip(self._why_not())
        set_look(self.button, "danger" if is_running else "primary")
        self._color_message()

    def _why_not(self) -> str:
        if not self.session.accepts_prompts:
            return why_no_prompts(self.session.live_mirror.capabilities) or "This engine accepts no prompts"
        return _OPERATORS_ONLY if self.session.is_viewer else ""

    def _color_message(self) -> None:
        sheet = f"color: {self.theme.bad if self.generator.message else self.theme.muted};"
        if sheet != self.message.styleSheet():  # Qt recomputes all styles even if nothing changed
            self.message.setStyleSheet(sheet)

    def _on_pace(self) -> None:
        is_concurrency = Pace(self.pace.currentText()) is Pace.CONCURRENCY
        self.concurrency.setVisible(is_concurrency)
        self.rate.setVisible(not is_concurrency)

    def _on_changed(self) -> None:
        if self.generator.is_running:
            try:
                self.generator.start(self.settings())
            except BadInput as error:
                self.generator.message = str(error)
        self.refresh()

    def _connect(self) -> None:
        self.button.clicked.connect(self.toggle)
        self.generator.changed.connect(self.refresh)
        self.session.status_changed.connect(self.refresh)
        self.pace.currentIndexChanged.connect(self._on_pace)
        for box in (self.pace, self.mix, self.adapter):
            box.currentIndexChanged.connect(self._on_changed)
        for field in (self.concurrency, self.rate, self.min_output, self.max_output):
            field.valueChanged.connect(self._on_changed)
        self._on_pace()

    def _lay_out(self) -> None:
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(14, 12, 14, 12)
        column.setSpacing(10)
        column.addLayout(self._build_form())
        column.addWidget(self.button)
        column.addWidget(self.message)
        column.addLayout(self._count_grid())
        column.addStretch(1)
        scroll = QScrollArea()
        scroll.setWidget(body)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(scroll)

    def _build_form(self) -> QGridLayout:
        form = QGridLayout()
        form.setHorizontalSpacing(10)
        form.setVerticalSpacing(8)
        form.setColumnStretch(1, 1)
        lengths = QHBoxLayout()
        lengths.setSpacing(10)
        lengths.addWidget(self.min_output, 1)
        lengths.addWidget(label("to", "muted"))
        lengths.addWidget(self.max_output, 1)
        pace = QHBoxLayout()
        pace.setSpacing(10)
        pace.addWidget(self.pace, 1)
        pace.addWidget(self.concurrency, 1)
        pace.addWidget(self.rate, 1)
        for row, text in enumerate(("Load", "Prompts", "Output")):
            form.addWidget(label(text, "muted"), row, 0)
        form.addWidget(self._adapter_name, 3, 0)
        form.addWidget(self.adapter, 3, 1)
        form.addLayout(pace, 0, 1)
        form.addWidget(self.mix, 1, 1)
        form.addLayout(lengths, 2, 1)
        return form

    def _count_grid(self) -> QGridLayout:
        grid = QGridLayout()
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(4)
        grid.setColumnStretch(0, 1)
        for row, name in enumerate(_COUNTS):
            grid.addWidget(label(name, "muted"), row, 0)
            grid.addWidget(self.counts[name], row, 1)
        return grid


def _combo_box(texts: list[str], name: str) -> QComboBox:
    box = QComboBox()
    box.addItems(texts)
    box.setAccessibleName(name)
    box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
    box.setMinimumContentsLength(_MIN_CHARACTERS)  # for narrow docks; the popup list is as wide as it needs
    return box


def _number_box(low: int, high: int, value: int, suffix: str, name: str) -> WholeNumberBox:
    box = WholeNumberBox()
    box.setRange(low, high)
    box.setValue(value)
    box.setSuffix(suffix)
    box.setMinimumWidth(_MIN_FIELD_WIDTH)
    box.setAccessibleName(name)
    return box
