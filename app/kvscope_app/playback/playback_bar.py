"""The bar over the status bar of a recording: play, jump to either end, where one is, how fast it goes.

Owns how the slider's place and the recording's follow each other. What the buttons do is in the actions.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QAction, QKeyEvent, QMouseEvent
from PySide6.QtWidgets import QComboBox, QFrame, QHBoxLayout, QSlider, QStyle, QStyleOptionSlider, QToolButton

from kvscope_app.look.icons import icon
from kvscope_app.look.plain_text import PlainLabel
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.playback.playback import BACK_S, SPEEDS, speed_text, time_text
from kvscope_app.session.session import Player, Session

_REFRESH_MS: Final = 50
_MAX_STEPS: Final = 1_000_000_000
"""A slider counts in 32 bits: of milliseconds that is 24.8 days."""


class TimeSlider(QSlider):
    """Milliseconds of a recording, or coarser steps of one that is too long for them. A press anywhere on it goes
    there."""

    space_pressed = Signal()

    def __init__(self, duration_s: float) -> None:
        super().__init__(Qt.Orientation.Horizontal)
        self._step_s = max(0.001, duration_s / _MAX_STEPS)
        self.setRange(0, self._steps(duration_s))
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setAccessibleName("Position in the recording")
        self.setSingleStep(max(1, self._steps(1.0)))
        self.setPageStep(max(1, self._steps(BACK_S)))

    @property
    def seconds(self) -> float:
        """Where it is."""
        return self.value() * self._step_s

    def show_seconds(self, seconds: float) -> None:
        """Be there, without telling anybody."""
        self.blockSignals(True)
        self.setValue(self._steps(seconds))
        self.blockSignals(False)

    def _steps(self, seconds: float) -> int:
        return round(seconds / self._step_s)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() is Qt.MouseButton.LeftButton:
            self.setSliderDown(True)
            self.setSliderPosition(self._value_at(event.position().x()))
        event.accept()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self.isSliderDown():
            self.setSliderPosition(self._value_at(event.position().x()))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        self.setSliderDown(False)

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.type() is QEvent.Type.KeyPress and event.key() == Qt.Key.Key_Space:
            self.space_pressed.emit()
            return True
        return super().event(event)

    def _value_at(self, x: float) -> int:
        option = QStyleOptionSlider()
        self.initStyleOption(option)
        handle = self.style().pixelMetric(QStyle.PixelMetric.PM_SliderLength, option, self)
        room = max(self.width() - handle, 1)
        return QStyle.sliderValueFromPosition(self.minimum(), self.maximum(), round(x - handle / 2), room)


class PlaybackBar(QFrame):
    """Follows `player`, of `session`. `buttons`: to the start, play, to the end."""

    def __init__(self, session: Session, player: Player, buttons: tuple[QAction, QAction, QAction]) -> None:
        super().__init__()
        self._player = player
        self._play = buttons[1]
        self._theme = DARK
        self.setProperty("look", "playback")
        self.setAccessibleName("Playback")
        self.slider = TimeSlider(player.duration)
        self.time = PlainLabel()
        self.speed = QComboBox()
        self._build(buttons)
        self.slider.valueChanged.connect(self._on_slider)
        self.slider.sliderPressed.connect(self._on_press)
        self.slider.sliderReleased.connect(self._on_release)
        self.slider.space_pressed.connect(self._play.trigger)
        self.speed.activated.connect(lambda index: player.set_speed(SPEEDS[index]))
        self._is_shown_playing: bool | None = None
        self._goes_on = False
        self._clock = QTimer(self, interval=_REFRESH_MS)
        self._clock.timeout.connect(self.refresh)
        self._clock.start()
        session.status_changed.connect(self.refresh)
        self.refresh()

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self._theme = theme
        self._is_shown_playing = None
        self.refresh()

    def refresh(self) -> None:
        """Show where the recording is."""
        player = self._player
        if not self.slider.isSliderDown():
            self.slider.show_seconds(player.position)
        self._show_time(self.slider.seconds if self.slider.isSliderDown() else player.position)
        if player.speed in SPEEDS:
            self.speed.setCurrentIndex(SPEEDS.index(player.speed))
        if player.is_playing is not self._is_shown_playing:
            self._is_shown_playing = player.is_playing
            self._play.setIcon(icon("pause" if player.is_playing else "play", self._theme.text, self._theme.border))
            self._play.setText("Pause" if player.is_playing else "Play")
            self._play.setToolTip(f"{self._play.text()} (Space)")

    def _show_time(self, seconds: float) -> None:
        duration = self._player.duration
        self.time.setText(f"{time_text(seconds, duration)} / {time_text(duration, duration)}")

    def _on_slider(self) -> None:
        """By the mouse or a key. While it is dragged the states alone will do, they come sooner."""
        self._player.seek(self.slider.seconds, with_past=not self.slider.isSliderDown())

    def _on_press(self) -> None:
        """As long as it is held it stands still where the person puts it."""
        self._goes_on = self._player.is_playing
        self._player.pause()

    def _on_release(self) -> None:
        self._player.seek(self.slider.seconds)
        if self._goes_on and self.slider.value() < self.slider.maximum():  # from the end it would begin again
            self._player.play()

    def _build(self, buttons: tuple[QAction, QAction, QAction]) -> None:
        row = QHBoxLayout(self)
        row.setContentsMargins(10, 4, 12, 4)
        row.setSpacing(4)
        for action in buttons:
            row.addWidget(_button(action))
        row.addSpacing(6)
        row.addWidget(self.slider, 1)
        row.addSpacing(8)
        row.addWidget(self.time)
        row.addSpacing(8)
        longest = time_text(self._player.duration, self._player.duration)
        self.time.setMinimumWidth(self.time.fontMetrics().horizontalAdvance(f"{longest} / {longest}") + 4)
        self.time.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self.speed.addItems([speed_text(speed) for speed in SPEEDS])
        self.speed.setAccessibleName("Speed")
        self.speed.setToolTip("How fast it is played: slower with [, faster with ]")
        self.speed.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        row.addWidget(self.speed)


def _button(action: QAction) -> QToolButton:
    button = QToolButton()
    button.setDefaultAction(action)
    button.setAutoRaise(True)
    button.setIconSize(QSize(17, 17))
    button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonIconOnly)
    button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
    return button
