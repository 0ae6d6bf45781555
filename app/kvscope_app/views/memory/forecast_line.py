"""One line: when free and cached blocks are gone at the present rate. There is none while they are not going."""

from __future__ import annotations

from typing import Final

from PySide6.QtWidgets import QHBoxLayout, QWidget

from kvscope_app.look.icons import pixmap
from kvscope_app.look.makers import label
from kvscope_app.look.number_text import seconds
from kvscope_app.look.theme import Theme
from kvscope_app.look.widgets import ElidedLabel
from kvscope_app.session.session import Session
from kvscope_telemetry.alarms.forecast import WINDOW_S
from kvscope_telemetry.alarms.seconds import forecast_at

_SOON_S: Final = 60.0
_TIP: Final = (
    f"By the slope of the last {WINDOW_S} seconds. Cached blocks count as free: they are given up when a request needs"
    " them. After that requests wait, or others are preempted"
)


class ForecastLine(QWidget):
    """At the cursor of `session`; hidden while there is nothing to say."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._sign = label()
        self._text = ElidedLabel()
        self.setToolTip(_TIP)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(self._sign)
        row.addWidget(self._text, 1)
        self.hide()

    @property
    def text(self) -> str:
        """What is said, empty when nothing is."""
        return "" if self.isHidden() else self._text.text()

    def refresh(self) -> None:
        """Show what there is to say of the moment that is shown."""
        left_s = forecast_at(self._session.course, self._session.cursor_ns)
        self.setVisible(left_s is not None)
        if left_s is not None:
            about = f"{left_s:.0f} s" if left_s < 60 else seconds(left_s)
            self._text.setText(f"{self._which()} gone in {about} at the present rate")
            self._sign.setVisible(left_s < _SOON_S)

    def _which(self) -> str:
        """What is still there to be gone: where no block is free, those in the cache are given up."""
        course, place = self._session.course, self._session.course.place_at(self._session.cursor_ns)
        there = [word for word in ("free", "cached") if course.column(f"{word}_blocks")[place] > 0]
        return f"{' and '.join(there).capitalize()} blocks"

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self._sign.setPixmap(pixmap("warning", theme.warn, 16))
