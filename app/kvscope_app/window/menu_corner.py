"""The buttons at the right end of the menu bar, and what the window shows in a word: live, paused or playback,
or that the engine stands still because somebody holds its steps."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QAction, QFont, QFontMetrics
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QToolButton, QWidget

from kvscope_app.look.plain_text import PlainLabel
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.look.zoom import scaled
from kvscope_app.session.session import Session
from kvscope_telemetry.source import SourceState

_LOOK_MS: Final = 100
_LATER_MS: Final = 1000
"""How often the time behind moves on once nobody reads its tenths any more."""
_TENTHS_S: Final = 10.0


class Corner(QWidget):
    """Live state and a few buttons."""

    def __init__(self, session: Session, live: QAction | None, buttons: list[QAction], parent: QWidget) -> None:
        super().__init__(parent)
        self._session = session
        self._theme = DARK
        self._color = ""
        self._state = PlainLabel()
        self._state.setAccessibleName("What the window shows")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 8, 0)
        row.setSpacing(2)
        # The menu bar does not follow a corner that grows: room for the widest state is kept.
        bold = self.font()
        bold.setWeight(QFont.Weight.Bold)
        self._state.setFixedWidth(QFontMetrics(bold).horizontalAdvance("PLAYING  88.8 s behind") + 24)
        self._state.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self._live = QPushButton("Go live")
        if live is not None:
            self._live.setToolTip(live.toolTip())
            self._live.clicked.connect(live.trigger)
        kept = self._live.sizePolicy()
        kept.setRetainSizeWhenHidden(True)
        self._live.setSizePolicy(kept)
        self._live.hide()
        row.addWidget(self._live)
        row.addWidget(self._state)
        for action in buttons:
            row.addWidget(_button(action))
        self._clock = QTimer(self, interval=_LOOK_MS)
        self._clock.timeout.connect(self.refresh)
        session.paused_changed.connect(self._paused_changed)
        session.status_changed.connect(self.refresh)

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self._theme = theme
        self.refresh()

    def refresh(self) -> None:
        """Show how far behind the present the window is."""
        if self._session.paused:
            word = "PLAYING" if self._session.is_playing else "PAUSED"
            self._show(f"{word}  {_behind(self._session.behind_seconds)}", self._theme.warn)
            self._keep_pace()
        elif self._session.status.state is SourceState.LIVE:
            self._show("LIVE", self._theme.good)
        elif self._session.status.state is SourceState.PAUSED:
            self._show("ENGINE HELD", self._theme.warn)
        elif self._session.is_file:
            self._show("PLAYBACK", self._theme.accent)
        else:
            self._show("", self._theme.muted)

    def _keep_pace(self) -> None:
        is_calm = not self._session.is_playing and self._session.behind_seconds >= _TENTHS_S
        wanted_ms = _LATER_MS if is_calm else _LOOK_MS
        if wanted_ms != self._clock.interval():
            self._clock.setInterval(wanted_ms)

    def _paused_changed(self) -> None:
        self._live.setVisible(self._session.paused)
        if self._session.paused:
            self._clock.start()
        else:
            self._clock.stop()
        self.refresh()

    def _show(self, text: str, color: str) -> None:
        if text != self._state.text():
            self._state.setText(text)
        if color != self._color:
            self._color = color
            self._state.setStyleSheet(f"color: {color}; font-weight: 700; padding: 0 8px;")
            self._state.setFixedHeight(self._state.sizeHint().height())  # or the window is laid out with each digit


def _behind(seconds: float) -> str:
    return f"{seconds:.1f} s behind" if seconds < 100 else f"{seconds // 60:.0f}:{seconds % 60:02.0f} behind"


def _button(action: QAction) -> QToolButton:
    button = QToolButton()
    button.setDefaultAction(action)
    button.setAutoRaise(True)
    button.setIconSize(QSize(scaled(17), scaled(17)))
    button.setAccessibleName(action.text().replace("&", ""))
    return button
