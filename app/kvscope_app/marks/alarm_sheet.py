"""The sheet on which a person says which alarms ring, and when."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtWidgets import (
    QCheckBox,
    QDialogButtonBox,
    QDoubleSpinBox,
    QGridLayout,
    QWidget,
)

from kvscope_app.look.makers import inset, label
from kvscope_app.marks.alarm_watch import AlarmWatch
from kvscope_app.views.told import why_not_measured
from kvscope_app.window.sheets.help_sheets import Sheet
from kvscope_telemetry.alarms.rules import DEFAULT_RULES, KINDS, SECONDS, Rule

_WIDTH = 780
_NOTE = (
    "Each rings once for a trouble, drops a bookmark and shows a notice. In a recording they are marked where they"
    " would have rung."
)


@dataclass(frozen=True, slots=True)
class _Row:
    """The widgets of one rule."""

    kind: str
    is_on: QCheckBox
    threshold: QDoubleSpinBox
    seconds: QDoubleSpinBox | None

    def show(self, rule: Rule) -> None:
        self.is_on.setChecked(rule.is_on)
        self.threshold.setValue(rule.threshold)
        if self.seconds is not None:
            self.seconds.setValue(rule.seconds)

    @property
    def rule(self) -> Rule:
        seconds = KINDS[self.kind].seconds if self.seconds is None else self.seconds.value()
        return Rule(kind=self.kind, is_on=self.is_on.isChecked(), threshold=self.threshold.value(), seconds=seconds)


class AlarmSheet(Sheet):
    """Of one window; what is chosen holds for windows that are opened later as well."""

    def __init__(self, watch: AlarmWatch, parent: QWidget) -> None:
        super().__init__("Alarms", parent)
        self._watch = watch
        grid = QGridLayout()
        grid.setHorizontalSpacing(12)
        grid.setVerticalSpacing(8)
        self.rows = {
            rule.kind: _row(grid, place, rule, why_not_measured(rule.kind, watch.capabilities))
            for place, rule in enumerate(watch.rules)
        }
        grid.setColumnStretch(1, 1)
        self.setMinimumWidth(_WIDTH)
        self.all = QCheckBox("All alarms")
        self.all.setChecked(any(rule.is_on for rule in watch.rules))
        self.all.clicked.connect(self._set_all)
        buttons = QDialogButtonBox(
            QDialogButtonBox.StandardButton.Ok
            | QDialogButtonBox.StandardButton.Cancel
            | QDialogButtonBox.StandardButton.RestoreDefaults
        )
        self.buttons = buttons
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        buttons.button(QDialogButtonBox.StandardButton.RestoreDefaults).clicked.connect(self._restore)
        self.column.addWidget(self.all)
        self.column.addLayout(grid)
        self.column.addWidget(label(_NOTE, "muted", wraps=True))
        self.column.addWidget(buttons)

    def accept(self) -> None:
        """Keep them."""
        self._watch.set_rules(tuple(row.rule for row in self.rows.values()))
        super().accept()

    def _restore(self) -> None:
        for rule in DEFAULT_RULES:
            self.rows[rule.kind].show(rule)

    def _set_all(self, is_on: bool) -> None:
        for row in self.rows.values():
            row.is_on.setChecked(is_on)


def _row(grid: QGridLayout, place: int, rule: Rule, why_not: str) -> _Row:
    """`why_not`: why it cannot be measured at this engine, "" where it can."""
    kind = KINDS[rule.kind]
    is_on = QCheckBox(kind.title)
    threshold = _number(kind.accepted, f" {kind.unit}".rstrip(), f"{kind.title}: threshold")
    seconds = _number(SECONDS, " s", f"{kind.title}: seconds") if kind.has_seconds else None
    row = _Row(rule.kind, is_on, threshold, seconds)
    grid.addWidget(is_on, place, 0)
    words = f"Cannot be measured here: {why_not}" if why_not else kind.condition
    grid.addWidget(label(words, "muted", wraps=True), place, 1)
    grid.addWidget(threshold, place, 2)
    if seconds is not None:
        grid.addWidget(label(kind.before_seconds, "muted"), place, 3)
        grid.addWidget(seconds, place, 4)
    for widget in (threshold, seconds):
        if widget is not None:
            is_on.toggled.connect(widget.setEnabled)
            widget.setEnabled(rule.is_on)
            widget.setVisible(not why_not)
    row.show(rule)
    return row


def _number(accepted: tuple[float, float], suffix: str, name: str) -> QDoubleSpinBox:
    box = QDoubleSpinBox()
    inset(box)
    is_count = not suffix
    box.setDecimals(0 if is_count else 2 if accepted[0] and accepted[0] < 0.1 else 1)
    box.setRange(*accepted)
    box.setSuffix(suffix)
    box.setAccessibleName(name)
    return box
