"""The strip that tells of an alarm: never modal, one notice a kind at a time, the newest in front.

Owns which are told. A trouble that is over says so and goes by itself; the list of bookmarks has all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QToolButton, QVBoxLayout

from kvscope_app.look.clock_text import wall_text
from kvscope_app.look.folding import FoldingFrame
from kvscope_app.look.icons import icon
from kvscope_app.look.mark_signs import sign_pixmap
from kvscope_app.look.number_text import seconds
from kvscope_app.look.passing_strip import PassingStrip
from kvscope_app.look.plain_text import PlainLabel
from kvscope_app.look.theme import Theme
from kvscope_app.marks.alarm_line import AlarmLine
from kvscope_app.marks.alarm_watch import AlarmWatch
from kvscope_telemetry.alarms.alarm_engine import Alarm
from kvscope_telemetry.alarms.words import alarm_text, rule_text

GOES_AFTER_S: Final = 20.0
"""Of a trouble that is over."""


class AlarmStrip(PassingStrip):
    """Hidden until an alarm of `watch` rings. `go_to` is given when it began; `show_all` brings up the list."""

    def __init__(self, watch: AlarmWatch, go_to: Callable[[int], None], show_all: Callable[[], None]) -> None:
        super().__init__()
        self._go_to = go_to
        self._told: dict[str, Alarm] = {}
        """By kind, the newest last."""
        self._over_s: dict[str, float] = {}
        self._sign, self._line = PlainLabel(), AlarmLine()
        self._more = PlainLabel()
        self.go, self.all, self.dismiss = QPushButton("Go there"), QPushButton("All alarms"), QToolButton()
        self._clock = QTimer(self, interval=1000)
        self._clock.timeout.connect(self._forget_old)
        self._lay_out()
        self.go.clicked.connect(self._go)
        self.all.clicked.connect(show_all)
        self.dismiss.clicked.connect(self._dismiss)
        watch.rang.connect(self._on_rang)
        watch.over.connect(self._on_over)
        self.hide()

    @property
    def text(self) -> str:
        """What is told now, empty when nothing is."""
        return f"{self._line.rule.text()} {self._line.detail.text()}" if self._told else ""

    @property
    def kinds(self) -> list[str]:
        """Of all that are told, the newest last."""
        return list(self._told)

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self._sign.setPixmap(sign_pixmap(is_note=False, theme=theme))
        self.dismiss.setIcon(icon("close", theme.muted, size=14))

    def _on_rang(self, alarm: Alarm) -> None:
        self._told.pop(alarm.kind, None)
        self._over_s.pop(alarm.kind, None)
        self._told[alarm.kind] = alarm
        self._show()

    def _on_over(self, alarm: Alarm) -> None:
        if alarm.kind in self._told:
            self._told[alarm.kind] = alarm
            self._over_s[alarm.kind] = time.monotonic()
            if not self._clock.isActive():  # others that end meanwhile do not put this one off
                self._clock.start()
            self._show()

    def _forget_old(self) -> None:
        now_s = time.monotonic()
        for kind in [kind for kind, at_s in self._over_s.items() if now_s - at_s >= GOES_AFTER_S]:
            self._forget(kind)
        self._show()

    def _go(self) -> None:
        self._go_to(next(reversed(self._told.values())).begin_ns)

    def _dismiss(self) -> None:
        self._forget(next(reversed(self._told)))
        self._show()

    def _forget(self, kind: str) -> None:
        self._told.pop(kind, None)
        self._over_s.pop(kind, None)

    def _show(self) -> None:
        if not self._over_s:
            self._clock.stop()
        alarm = next(reversed(self._told.values()), None)
        self.setVisible(alarm is not None)
        if alarm is None:
            return
        more = len(self._told) - 1
        self._line.tell(rule_text(alarm.rule), _detail(alarm))
        self._more.setText(f"and {more} more" if more else "")
        self.setAccessibleName(f"Alarm: {self.text}")

    def _lay_out(self) -> None:
        self._more.setProperty("look", "muted")
        self.go.setToolTip("Show the moment when it began")
        self.all.setToolTip("The list of bookmarks and alarms")
        self.dismiss.setAccessibleName("Dismiss")
        self.dismiss.setToolTip("Dismiss; the alarm stays in the list")
        words, buttons = QHBoxLayout(), QHBoxLayout()
        words.setSpacing(10)
        words.addWidget(self._sign)
        words.addWidget(self._line, 1)
        buttons.setSpacing(10)
        for widget in (self._more, self.go, self.all):
            buttons.addWidget(widget)
        frame = FoldingFrame(words, buttons, self.dismiss)
        frame.setProperty("look", "notice")
        outer = QVBoxLayout(self)
        outer.setContentsMargins(8, 8, 8, 2)
        outer.addWidget(frame)


def _detail(alarm: Alarm) -> str:
    began = wall_text(alarm.begin_ns)
    if alarm.until_ns:
        return f"over after {seconds((alarm.until_ns - alarm.begin_ns) / 1e9)}, {alarm_text(alarm)}; from {began}"
    return f"since {began}"
