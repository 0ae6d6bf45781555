"""Dialog that edits the alarm rules and the webhook that alarms are posted to.

Owns one row of fields per rule. Below each row is a note that says what is wrong with the rule, or why the rule
cannot be measured for this engine.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

from msgspec.structs import replace
from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QFocusEvent, QResizeEvent
from PySide6.QtWidgets import (
    QCheckBox,
    QDialogButtonBox,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QMenu,
    QPushButton,
    QScrollArea,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.alarms.alarm_evaluator import AlarmEvaluator
from kvscope_app.ui.fonts import mono
from kvscope_app.ui.icons import icon
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import label, seconds_box, set_look
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.capability_messages import why_not_measured
from kvscope_telemetry.alarms.alarm_figures import SECOND_FIGURES, SecondFigure, value_text
from kvscope_telemetry.alarms.expression import Expression
from kvscope_telemetry.alarms.rules import DEFAULT_RULES, MAX_SECONDS, Rule, parse_rule, rule_error
from kvscope_telemetry.alarms.webhook import checked_url
from kvscope_telemetry.errors import BadInput

_SIZE: Final = (960, 620)
_VALUE_WIDTH: Final = 108
_MIN_UNFOLDED_WIDTH: Final = 700
"""Minimum width, in pixels before scaling, of a rule's row on one line. A narrower row has the expression on a second
line.
"""
_HINT: Final = (
    "An alarm fires once per incident, adds a bookmark and shows a notification. No alarm fires while the engine is "
    "paused. In a recording, alarms are marked where they would have fired."
)
_URL_HINT: Final = "Optional: https://host/path receives a JSON POST when an alarm fires or ends"
_EXPRESSION_HINT: Final = "For example: ttft_p99_ms > 500 and running > 8"


class AlarmDialog(Sheet):
    def __init__(self, evaluator: AlarmEvaluator, theme: Theme, parent: QWidget) -> None:
        super().__init__("Alarms", parent)
        self._evaluator, self._theme = evaluator, theme
        self.rows: list[RuleRow] = []
        self._last_row: RuleRow | None = None
        """Row whose expression had the keyboard focus last; None if that row was removed or no expression had it yet.
        """
        self.all_box = QCheckBox("All alarms")
        self.all_box.clicked.connect(self._switch_all)
        self.add_button = QPushButton("Add alarm")
        self.add_button.clicked.connect(self._add_new)
        self.figure_button = QPushButton("Insert figure")
        self.figure_button.setToolTip("Insert a figure into the expression edited last")
        self.figure_button.setMenu(self._figure_menu())
        self.url, self._url_note = QLineEdit(evaluator.settings.values.alarm_webhook), label("", "warning", wraps=True)
        self.url.setPlaceholderText(_URL_HINT)
        self.url.setAccessibleName("Webhook")
        self.url.textChanged.connect(self._check)
        self.buttons = QDialogButtonBox(
            QDialogButtonBox.StandardButton.Ok
            | QDialogButtonBox.StandardButton.Cancel
            | QDialogButtonBox.StandardButton.RestoreDefaults
        )
        for button in (self.add_button, self.figure_button):
            button.setAutoDefault(False)  # Enter in a field presses OK
        self.buttons.button(QDialogButtonBox.StandardButton.Ok).setDefault(True)
        self.buttons.accepted.connect(self.accept)
        self.buttons.rejected.connect(self.reject)
        self.buttons.button(QDialogButtonBox.StandardButton.RestoreDefaults).clicked.connect(self._restore_defaults)
        self._lay_out()
        self._show_rules(evaluator.settings.values.alarm_rules)
        evaluator.evaluated.connect(self._show_values)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(row.rule for row in self.rows)

    def accept(self) -> None:
        """Save the rules and the webhook and close the dialog. Does nothing if a rule or the webhook is invalid."""
        if self.buttons.button(QDialogButtonBox.StandardButton.Ok).isEnabled():
            self._evaluator.settings.change(alarm_rules=self.rules, alarm_webhook=self.url.text().strip())
            super().accept()

    def _lay_out(self) -> None:
        body = QWidget()
        self._column = QVBoxLayout(body)
        self._column.setContentsMargins(0, 0, 12, 0)
        self._column.setSpacing(8)
        self._column.addStretch(1)
        self.area = QScrollArea()
        self.area.setWidgetResizable(True)
        self.area.setFrameShape(QFrame.Shape.NoFrame)
        self.area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.area.setWidget(body)
        buttons_row, webhook_grid = QHBoxLayout(), QGridLayout()
        for widget in (self.add_button, self.figure_button):
            buttons_row.addWidget(widget)
        buttons_row.addStretch(1)
        webhook_label = label("Webhook")
        webhook_label.setBuddy(self.url)
        webhook_grid.setHorizontalSpacing(12)
        webhook_grid.addWidget(webhook_label, 0, 0)
        webhook_grid.addWidget(self.url, 0, 1)
        webhook_grid.addWidget(self._url_note, 1, 1)
        self.column.addWidget(self.all_box)
        self.column.addWidget(self.area, 1)
        self.column.addLayout(buttons_row)
        self.column.addLayout(webhook_grid)
        if self._evaluator.command_line_text:
            self.column.addWidget(label(self._evaluator.command_line_text, "muted", wraps=True))
        self.column.addWidget(label(_HINT, "muted", wraps=True))
        self.column.addWidget(self.buttons)
        available = self.screen().availableGeometry().size()
        self.resize(QSize(scaled(_SIZE[0]), scaled(_SIZE[1])).boundedTo(available))

    def _show_rules(self, rules: tuple[Rule, ...]) -> None:
        for row in self.rows:
            self._column.removeWidget(row)
            row.deleteLater()
        self.rows, self._last_row = [], None
        for rule in rules:
            self._add_row(rule)
        self.all_box.setChecked(any(rule.is_on for rule in rules))
        self._check()

    def _add_row(self, rule: Rule) -> RuleRow:
        row = RuleRow(rule, self._theme)
        row.edited.connect(self._check)
        row.entered.connect(partial(self._set_last_row, row))
        row.remove_button.clicked.connect(partial(self._remove, row))
        self.rows.append(row)
        self._column.insertWidget(self._column.count() - 1, row)
        return row

    def _add_new(self) -> None:
        names = {row.name.text() for row in self.rows}
        name = next(each for each in (f"Alarm {number}" for number in range(1, 1000)) if each not in names)
        row = self._add_row(Rule(name=name, expression="", seconds=10.0))
        self._check()
        row.show()
        row.expression.setFocus()
        self._column.activate()
        self.area.ensureWidgetVisible(row)

    def _remove(self, row: RuleRow) -> None:
        self.rows.remove(row)
        self._last_row = None if self._last_row is row else self._last_row
        self._column.removeWidget(row)
        row.hide()
        row.deleteLater()
        self.add_button.setFocus()
        self._check()

    def _set_last_row(self, row: RuleRow) -> None:
        self._last_row = row

    def _restore_defaults(self) -> None:
        """Reset the predefined rules to their defaults. Keep the rules that the user added."""
        names = {rule.name for rule in DEFAULT_RULES}
        self._show_rules((*DEFAULT_RULES, *(rule for rule in self.rules if rule.name not in names)))

    def _switch_all(self, is_on: bool) -> None:
        for row in self.rows:
            row.on_box.setChecked(is_on)

    def _figure_menu(self) -> QMenu:
        menu = QMenu(self)
        groups: dict[str, QMenu] = {}
        for figure in SECOND_FIGURES.values():
            group = groups.get(figure.group) or groups.setdefault(figure.group, menu.addMenu(figure.group))
            action = group.addAction(f"{figure.name}\t{figure.label}")
            action.triggered.connect(partial(self._insert, figure))
        return menu

    def _insert(self, figure: SecondFigure) -> None:
        if self._last_row is None and not self.rows:
            self._add_new()
        row = self._last_row or self.rows[-1]
        row.expression.insert(figure.name)
        row.expression.setFocus()

    def _check(self) -> None:
        """Show errors below each rule, and enable OK only if all rules and the webhook are valid."""
        names = [row.name.text().strip() for row in self.rows]
        are_all_valid = True
        for row, name in zip(self.rows, names, strict=True):
            why_not = "Another alarm has this name" if names.count(name) > 1 else rule_error(row.rule)
            are_all_valid = are_all_valid and not why_not
            row.show_reason(why_not, "" if why_not else why_not_measured(row.rule, self._evaluator.capabilities))
        url_note = ""
        try:
            checked_url(self.url.text()) if self.url.text().strip() else ""
        except BadInput as error:
            url_note = str(error)
        self._url_note.setText(url_note)
        self._url_note.setVisible(bool(url_note))
        self.buttons.button(QDialogButtonBox.StandardButton.Ok).setEnabled(are_all_valid and not url_note)
        self._show_values()

    def _show_values(self) -> None:
        for row in self.rows:
            row.show_value(self._evaluator)


class RuleRow(QWidget):
    """Editor of one rule, with a note below. If the note is cut off, its tooltip has the complete text."""

    edited = Signal()
    entered = Signal()

    def __init__(self, rule: Rule, theme: Theme) -> None:
        super().__init__()
        self.on_box, self.name, self.expression = QCheckBox(), QLineEdit(rule.name), _Expression(rule.expression)
        self.seconds = seconds_box(0.0, MAX_SECONDS, rule.seconds, "For how long")
        self.remove_button = QToolButton()
        self.remove_button.setIcon(icon("trash", theme.muted, size=15))
        self._value_label, self._note_label = ElidedLabel(), ElidedLabel()
        self._value_label.setProperty("look", "muted")
        self._note_label.setProperty("look", "warning")
        self.on_box.setChecked(rule.is_on)
        self.expression.setFont(mono())
        self.expression.setPlaceholderText(_EXPRESSION_HINT)
        self.name.setCursorPosition(0)  # shows the start of a long name
        self.expression.setCursorPosition(0)
        self._lay_out()
        self._set_accessible_names()
        self.name.textChanged.connect(self._set_accessible_names)
        for line in (self.name, self.expression):
            line.textChanged.connect(self.edited)
        self.seconds.valueChanged.connect(self.edited)
        self.on_box.toggled.connect(self.edited)
        self.expression.entered.connect(self.entered)
        self.expression.editingFinished.connect(self._on_seconds_edited)

    @property
    def rule(self) -> Rule:
        rule = Rule(
            name=self.name.text().strip(),
            expression=" ".join(self.expression.text().split()),
            seconds=self.seconds.value(),
            is_on=self.on_box.isChecked(),
        )
        typed_rule = _with_seconds(rule.expression)
        return (
            rule if typed_rule is None else replace(rule, expression=typed_rule.expression, seconds=typed_rule.seconds)
        )

    @property
    def note(self) -> str:
        return self._note_label.text()

    @property
    def shown_value(self) -> str:
        return self._value_label.text()

    def show_reason(self, why_not: str, why_unknown: str) -> None:
        """Show a note below the row: `why_not` says what is wrong with the rule, `why_unknown` why it cannot be
        measured.

        If both are given, `why_not` is shown; if both are empty, no note is shown.
        """
        self._note_label.setText(why_not or (f"Cannot be measured here: {why_unknown}" if why_unknown else ""))
        set_look(self._note_label, "warning" if why_not else "muted")
        self._note_label.setVisible(bool(self.note))

    def show_value(self, evaluator: AlarmEvaluator) -> None:
        try:
            text = _value_text(Expression(self.rule.expression), evaluator)
        except BadInput:
            text = ""
        self._value_label.setText(text)
        self.expression.setToolTip(text)

    def _on_seconds_edited(self) -> None:
        """Move a duration that was typed as `... for 10 s` from the expression to the field for seconds."""
        typed_rule = _with_seconds(self.expression.text())
        if typed_rule is not None:
            self.seconds.setValue(typed_rule.seconds)
            self.expression.setText(typed_rule.expression)

    def _set_accessible_names(self) -> None:
        name = self.name.text() or "Alarm"
        self.on_box.setAccessibleName(f"{name}: on")
        self.on_box.setToolTip("On or off")
        self.name.setAccessibleName("Name of the alarm")
        self.expression.setAccessibleName(f"{name}: expression")
        self.seconds.setAccessibleName(f"{name}: for how long")
        self.remove_button.setAccessibleName(f"Remove {name}")
        self.remove_button.setToolTip("Remove this alarm")

    @property
    def is_folded(self) -> bool:
        return self._is_folded

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if self._is_folded is not (self.width() < scaled(_MIN_UNFOLDED_WIDTH)):
            self._arrange(is_folded=not self._is_folded)

    def _lay_out(self) -> None:
        self.name.setMinimumWidth(scaled(60))
        self.expression.setMinimumWidth(scaled(60))
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(8)
        self._grid.setVerticalSpacing(3)
        self._for_label = label("for", "muted")
        self._note_label.hide()
        self._arrange(is_folded=True)

    def _arrange(self, *, is_folded: bool) -> None:
        """Lay the row out on one line or, if `is_folded`, with the expression on a second line.

        A folded row has no space for the expression's current value, which is then only in the expression's tooltip.
        """
        self._is_folded = is_folded
        self._value_label.setVisible(not is_folded)
        first = (self.on_box, self.name, self._for_label, self.seconds, self.remove_button)
        cells = {part: (0, index, 1) for part, index in zip(first, (0, 1, 4, 5, 6), strict=True)}
        cells |= {
            self.expression: (1, 1, 6) if is_folded else (0, 2, 1),
            self._value_label: (0, 3, 1),
            self._note_label: (2, 1, 6),
        }
        for part, (row, column, num_columns) in cells.items():
            self._grid.removeWidget(part)
            self._grid.addWidget(part, row, column, 1, num_columns)
        self._grid.setColumnMinimumWidth(3, 0 if is_folded else scaled(_VALUE_WIDTH))
        self._grid.setColumnStretch(1, 4 if is_folded else 2)
        self._grid.setColumnStretch(2, 0 if is_folded else 4)


class _Expression(QLineEdit):
    entered = Signal()

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.entered.emit()


def _with_seconds(text: str) -> Rule | None:
    """Return the rule parsed from a valid expression that ends in `for N s`; None for any other text."""
    try:
        rule = parse_rule(text)
    except BadInput:
        return None
    return rule if rule.seconds and ":" not in text else None


def _value_text(expression: Expression, evaluator: AlarmEvaluator) -> str:
    value = evaluator.value_of_last_second(expression)
    if math.isnan(value):
        return "last second: unknown"
    return f"last second: {value_text(value, expression.unit) if math.isfinite(value) else '∞'}"
