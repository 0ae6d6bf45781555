"""Strip that shows alarms without blocking the window: one notice for each rule, the newest in front.

Owns the list of alarms that are shown. An alarm that has ended is marked as over and disappears after a while; the
bookmark list keeps all alarms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QTimer
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QHBoxLayout, QPushButton, QSizePolicy, QToolButton, QVBoxLayout, QWidget

from kvscope_app.alarms.alarm_evaluator import AlarmEvaluator
from kvscope_app.ui.clock_text import wall_text
from kvscope_app.ui.folding_frame import FoldingFrame
from kvscope_app.ui.icons import icon
from kvscope_app.ui.mark_signs import sign_pixmap
from kvscope_app.ui.number_text import seconds
from kvscope_app.ui.passing_strip import PassingStrip
from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.theme import Theme
from kvscope_telemetry.alarms.alarm_engine import Alarm, alarm_text
from kvscope_telemetry.alarms.rules import describe_rule

_SPACING: Final = 10
HIDE_AFTER_S: Final = 20.0
"""Seconds after which an alarm that has ended disappears from the strip."""


class AlarmStrip(PassingStrip):
    """Strip that is hidden until an alarm of `evaluator` starts.

    `seek` is called with the time in ns at which the alarm began; `show_all` opens the list of alarms.
    """

    def __init__(self, evaluator: AlarmEvaluator, seek: Callable[[int], None], show_all: Callable[[], None]) -> None:
        super().__init__()
        self._seek = seek
        self._shown_alarms: dict[str, Alarm] = {}
        """Shown alarms by the name of their rule, the newest last."""
        self._ended_s: dict[str, float] = {}
        self._sign_label, self._line = PlainLabel(), AlarmLine()
        self._more_label = PlainLabel()
        self.go_button, self.all_button, self.dismiss_button = (
            QPushButton("Go there"),
            QPushButton("All alarms"),
            QToolButton(),
        )
        self._expiry_timer = QTimer(self, interval=1000)
        self._expiry_timer.timeout.connect(self._forget_old)
        self._lay_out()
        self.go_button.clicked.connect(self._show_in_timeline)
        self.all_button.clicked.connect(show_all)
        self.dismiss_button.clicked.connect(self._dismiss)
        evaluator.alarm_started.connect(self._on_alarm_started)
        evaluator.alarm_updated.connect(self._on_alarm_updated)
        evaluator.alarm_ended.connect(self._on_alarm_ended)
        self.hide()

    @property
    def text(self) -> str:
        return f"{self._line.rule.text()} {self._line.detail.text()}" if self._shown_alarms else ""

    @property
    def names(self) -> list[str]:
        return list(self._shown_alarms)

    def apply_theme(self, theme: Theme) -> None:
        self._sign_label.setPixmap(sign_pixmap(is_note=False, theme=theme))
        self.dismiss_button.setIcon(icon("close", theme.muted, size=14))

    def _on_alarm_started(self, alarm: Alarm) -> None:
        self._shown_alarms.pop(alarm.name, None)
        self._ended_s.pop(alarm.name, None)
        self._shown_alarms[alarm.name] = alarm
        self._refresh()

    def _on_alarm_updated(self, alarm: Alarm) -> None:
        if alarm.name in self._shown_alarms:
            self._shown_alarms[alarm.name] = alarm
            self._refresh()

    def _on_alarm_ended(self, alarm: Alarm) -> None:
        if alarm.name in self._shown_alarms:
            self._shown_alarms[alarm.name] = alarm
            self._ended_s[alarm.name] = time.monotonic()
            if not self._expiry_timer.isActive():  # restarting the timer would delay the alarms that ended before
                self._expiry_timer.start()
            self._refresh()

    def _forget_old(self) -> None:
        now_s = time.monotonic()
        for name in [name for name, at_s in self._ended_s.items() if now_s - at_s >= HIDE_AFTER_S]:
            self._forget(name)
        self._refresh()

    def _show_in_timeline(self) -> None:
        self._seek(next(reversed(self._shown_alarms.values())).begin_ns)

    def _dismiss(self) -> None:
        self._forget(next(reversed(self._shown_alarms)))
        self._refresh()

    def _forget(self, name: str) -> None:
        self._shown_alarms.pop(name, None)
        self._ended_s.pop(name, None)

    def _refresh(self) -> None:
        if not self._ended_s:
            self._expiry_timer.stop()
        alarm = next(reversed(self._shown_alarms.values()), None)
        self.setVisible(alarm is not None)
        if alarm is None:
            return
        num_others = len(self._shown_alarms) - 1
        self._line.show_alarm(alarm.name, f"{describe_rule(alarm.rule)}, {_detail_text(alarm)}")
        self._more_label.setText(f"and {num_others} more" if num_others else "")
        self.setAccessibleName(f"Alarm: {self.text}")

    def _lay_out(self) -> None:
        self._more_label.setProperty("look", "muted")
        self.go_button.setToolTip("Go to the moment it began")
        self.all_button.setToolTip("Show bookmarks and alarms")
        self.dismiss_button.setAccessibleName("Dismiss")
        self.dismiss_button.setToolTip("Dismiss (the alarm stays in the list)")
        text_row, buttons = QHBoxLayout(), QHBoxLayout()
        text_row.setSpacing(10)
        text_row.addWidget(self._sign_label)
        text_row.addWidget(self._line, 1)
        buttons.setSpacing(10)
        for widget in (self._more_label, self.go_button, self.all_button):
            buttons.addWidget(widget)
        frame = FoldingFrame(text_row, buttons, self.dismiss_button)
        frame.setProperty("look", "notice")
        outer = QVBoxLayout(self)
        outer.setContentsMargins(8, 8, 8, 2)
        outer.addWidget(frame)


def _detail_text(alarm: Alarm) -> str:
    start_text = wall_text(alarm.begin_ns)
    if alarm.until_ns:
        duration = seconds((alarm.until_ns - alarm.begin_ns) / 1e9)
        return (
            ", ".join(part for part in (f"over after {duration}", alarm_text(alarm)) if part) + f"; from {start_text}"
        )
    worst = alarm_text(alarm)
    return f"since {start_text}, {worst} so far" if worst else f"since {start_text}"


class AlarmLine(QWidget):
    """An alarm's rule and details: side by side, or below each other and wrapped if one line is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.rule, self.detail = PlainLabel(), PlainLabel()
        self.rule.setProperty("look", "heading")
        self.detail.setProperty("look", "muted")
        self._row = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._row.setContentsMargins(0, 0, 0, 0)
        for label in (self.rule, self.detail):
            label.setMinimumWidth(24)
            self._row.addWidget(label)
        self._row.addStretch()
        self._arrange(is_narrow=False)

    @property
    def is_narrow(self) -> bool:
        return self._row.direction() is QBoxLayout.Direction.TopToBottom

    def show_alarm(self, rule: str, detail: str) -> None:
        self.rule.setText(rule)
        self.detail.setText(detail)
        self._fold()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fold()

    def _fold(self) -> None:
        needed_width = sum(label.fontMetrics().horizontalAdvance(label.text()) + _SPACING for label in self._labels)
        if self.is_narrow is not (self.width() < needed_width):
            self._arrange(is_narrow=not self.is_narrow)

    def _arrange(self, *, is_narrow: bool) -> None:
        direction = QBoxLayout.Direction.TopToBottom if is_narrow else QBoxLayout.Direction.LeftToRight
        self._row.setDirection(direction)
        self._row.setSpacing(1 if is_narrow else _SPACING)
        across = QSizePolicy.Policy.Ignored if is_narrow else QSizePolicy.Policy.Maximum
        policy = QSizePolicy(across, QSizePolicy.Policy.Minimum)
        policy.setHeightForWidth(is_narrow)
        for label in self._labels:
            label.setWordWrap(is_narrow)
            label.setSizePolicy(policy)

    @property
    def _labels(self) -> tuple[PlainLabel, PlainLabel]:
        return self.rule, self.detail
