"""Widget at the right end of the menu bar: buttons, and the state of the window (live, paused, playback, or engine
paused).
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QObject, QSize, Qt, QTimer
from PySide6.QtGui import QAction, QFont, QFontMetrics
from PySide6.QtWidgets import QHBoxLayout, QMenu, QMenuBar, QPushButton, QToolButton, QWidget

from kvscope_app.session.session import Session
from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_telemetry.source import SourceState

_REFRESH_MS: Final = 100
_SLOW_REFRESH_MS: Final = 1000
"""Interval in ms at which the displayed delay is refreshed once it is longer than `_MAX_TENTHS_S`."""
_MAX_TENTHS_S: Final = 10.0
_SPACING: Final = 2
_RIGHT_MARGIN: Final = 8


class MenuBarCorner(QWidget):
    _bar: QMenuBar | None = None
    """Menu bar that contains this widget. It is a class attribute because Qt asks for sizes before the constructor has
    finished.
    """

    def __init__(self, session: Session, live: QAction | None, buttons: list[QAction], parent: QWidget) -> None:
        super().__init__(parent)
        self._session = session
        self._theme = DARK
        self._color = ""
        self._state_label = PlainLabel()
        self._state_label.setAccessibleName("Current view: live or past")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, _RIGHT_MARGIN, 0)
        row.setSpacing(_SPACING)
        self._state_label.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self._live_button = QPushButton("Go live", self)
        if live is not None:
            self._live_button.setToolTip(live.toolTip())
            self._live_button.clicked.connect(live.trigger)
        size_policy = self._live_button.sizePolicy()
        size_policy.setRetainSizeWhenHidden(True)
        self._live_button.setSizePolicy(size_policy)
        self._live_button.hide()
        self._has_live = live is not None
        if self._has_live:
            row.addWidget(self._live_button)
        row.addWidget(self._state_label)
        self._buttons = [_button(action) for action in buttons]
        for button in self._buttons:
            row.addWidget(button)
        self._more_button = _make_more_button(buttons)
        self._more_button.hide()
        row.addWidget(self._more_button)
        self._is_narrow = False
        self._state_label.setFixedWidth(self._state_width())
        self._refresh_timer = QTimer(self, interval=_REFRESH_MS)
        self._refresh_timer.timeout.connect(self.refresh)
        session.timeline.paused_changed.connect(self._paused_changed)
        session.status_changed.connect(self.refresh)

    def attach_to(self, bar: QMenuBar) -> None:
        """Put this widget at the right end of `bar`. If space is short, the bar's menus have priority."""
        self._bar = bar
        bar.setCornerWidget(self, Qt.Corner.TopRightCorner)
        bar.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize:
            self._hide_what_does_not_fit()
        return False

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange:
            self._hide_what_does_not_fit()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._hide_what_does_not_fit()
        self.refresh()

    def refresh(self) -> None:
        timeline = self._session.timeline
        if timeline.is_paused:
            word = "PLAYING" if timeline.is_playing else "PAUSED"
            behind = _delay_text(timeline.behind_seconds)
            self._show_state(word if self._is_narrow else f"{word}  {behind}", self._theme.warn)
            self._state_label.setToolTip(behind if self._is_narrow else "")
            self._adjust_interval()
        elif self._session.status.state is SourceState.LIVE:
            self._show_state("LIVE", self._theme.good)
        elif self._session.status.state is SourceState.PAUSED:
            self._show_state("ENGINE PAUSED", self._theme.warn)
        elif timeline.is_file:
            self._show_state("PLAYBACK", self._theme.accent)
        else:
            self._show_state("", self._theme.muted)

    def _hide_what_does_not_fit(self) -> None:
        """Move the buttons into a menu and shorten the state text if the menu bar's menus need the space.

        If the space is still too small, the state text is hidden, because the status bar shows the state as well. Then
        the menu with the buttons is hidden, because the menu bar has all of its actions.
        """
        if self._bar is None:
            return
        menus_width = self._bar.sizeHint().width() - self.sizeHint().width()
        if self._bar.actions():  # in line with the menus, with or without buttons
            self.setMinimumHeight(self._bar.actionGeometry(self._bar.actions()[0]).height())
        shown_widgets = [*([self._live_button] if self._has_live else []), *self._buttons]
        full_width = (
            self._state_width() + sum(widget.sizeHint().width() + _SPACING for widget in shown_widgets) + _RIGHT_MARGIN
        )
        is_narrow, before = menus_width + full_width > self._bar.width(), self._state_label.width()
        live_width = self._live_button.sizeHint().width() + _SPACING if self._has_live else 0
        more_width = self._more_button.sizeHint().width() + _SPACING
        has_more = is_narrow and menus_width + live_width + more_width + _RIGHT_MARGIN <= self._bar.width()
        has_capacity = not is_narrow or (
            menus_width + live_width + more_width + self._state_width(is_narrow=True) + _RIGHT_MARGIN
            <= self._bar.width()
        )
        had_more = not self._more_button.isHidden()
        self._more_button.setVisible(has_more)
        self._state_label.setFixedWidth(self._state_width(is_narrow) if has_capacity else 0)
        if is_narrow is not self._is_narrow:
            self._is_narrow = is_narrow
            for button in self._buttons:
                button.setVisible(not is_narrow)
            self.refresh()
        elif before == self._state_label.width() and had_more is has_more:
            return
        self._bar.setCornerWidget(self, Qt.Corner.TopRightCorner)  # Qt does not follow when the corner widget grows

    def _state_width(self, is_narrow: bool = False) -> int:
        """Return the width of the longest state text, so that a changing text moves no other widget."""
        bold = self.font()
        bold.setWeight(QFont.Weight.Bold)
        return QFontMetrics(bold).horizontalAdvance("ENGINE PAUSED" if is_narrow else "PLAYING  88.8 s behind") + 24

    def _adjust_interval(self) -> None:
        timeline = self._session.timeline
        is_calm = not timeline.is_playing and timeline.behind_seconds >= _MAX_TENTHS_S
        wanted_ms = _SLOW_REFRESH_MS if is_calm else _REFRESH_MS
        if wanted_ms != self._refresh_timer.interval():
            self._refresh_timer.setInterval(wanted_ms)

    def _paused_changed(self) -> None:
        self._live_button.setVisible(self._session.timeline.is_paused)
        if self._session.timeline.is_paused:
            self._refresh_timer.start()
        else:
            self._refresh_timer.stop()
        self.refresh()

    def _show_state(self, text: str, color: str) -> None:
        if text != self._state_label.text():
            self._state_label.setText(text)
        if color != self._color:
            self._color = color
            self._state_label.setStyleSheet(f"color: {color}; font-weight: 700; padding: 0 8px;")
            # Without a fixed height, each new digit would cause a layout of the window.
            self._state_label.setFixedHeight(self._state_label.sizeHint().height())


def _delay_text(seconds: float) -> str:
    return f"{seconds:.1f} s behind" if seconds < 100 else f"{seconds // 60:.0f}:{seconds % 60:02.0f} behind"


def _make_more_button(actions: list[QAction]) -> QToolButton:
    button = QToolButton()
    button.setText("»")
    button.setToolTip("More actions")
    button.setAccessibleName("More actions")
    button.setAutoRaise(True)
    button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
    menu = QMenu(button)
    menu.addActions(actions)
    button.setMenu(menu)
    return button


def _button(action: QAction) -> QToolButton:
    button = QToolButton()
    button.setDefaultAction(action)
    button.setAutoRaise(True)
    button.setIconSize(QSize(scaled(17), scaled(17)))
    button.setAccessibleName(action.text().replace("&", ""))
    return button
