"""Bar below the page map: play, jump to either end, position on the timeline, and speed.

Synchronizes the slider with the timeline's cursor. The actions define what the buttons do.
"""

from __future__ import annotations

from typing import Final, Protocol

from PySide6.QtCore import QEvent, QObject, QPoint, QRectF, QSize, Qt, QTimer, SignalInstance
from PySide6.QtGui import QAction, QKeyEvent, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QComboBox, QFrame, QHBoxLayout, QToolButton, QToolTip, QWidget

from kvscope_app.playback.playback import SPEEDS, speed_text, time_text
from kvscope_app.playback.time_slider import TimeSlider
from kvscope_app.session.mark_labels import mark_text
from kvscope_app.session.timeline import Timeline
from kvscope_app.ui.clock_text import wall_text
from kvscope_app.ui.icons import icon
from kvscope_app.ui.mark_signs import paint_loop, paint_sign
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.steady_label import SteadyLabel
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_telemetry.summaries.bookmark import Bookmark

_HIT_DISTANCE_PX: Final = 5.0
_MIN_SIGN_DISTANCE_PX: Final = 2.0
_SIGN_HEIGHT: Final = 8.0
MIN_SLIDER_HEIGHT: Final = 24
"""Minimum height of the slider in pixels, with space for bookmark signs above its groove."""
_REFRESH_MS: Final = 50
_MIN_WIDTH: Final = 240
_MIN_SLIDER_WIDTH: Final = 40
_SAMPLE_TIME: Final = "00:00:00"


class ShownBookmarks(Protocol):
    """Bookmarks of one session, or of two that are compared, for display only."""

    @property
    def changed(self) -> SignalInstance: ...
    @property
    def shown(self) -> list[Bookmark]: ...


class PlaybackBar(QFrame):
    """Bar that controls `timeline`. `buttons` are, in this order: to the start, previous frame, play, next frame, to
    the end.
    """

    def __init__(self, timeline: Timeline, bookmarks: ShownBookmarks, buttons: tuple[QAction, ...]) -> None:
        super().__init__()
        self._timeline = timeline
        self._play_action = next(action for action in buttons if action.objectName() == "play")
        self._theme = DARK
        self.setProperty("look", "playback")
        self.setAccessibleName("Timeline")
        self.slider = TimeSlider(0.0)
        self.slider.setMinimumHeight(MIN_SLIDER_HEIGHT)
        self.slider.setMinimumWidth(_MIN_SLIDER_WIDTH)
        self.marks = SliderMarks(timeline, bookmarks, self.slider)
        self.time = SteadyLabel("00:00.0 / 00:00.0 ")
        self.wall = SteadyLabel(f"{_SAMPLE_TIME} ")
        self.speed = QComboBox()
        self._build(buttons)
        self.slider.valueChanged.connect(self._on_slider)
        self.slider.sliderPressed.connect(self._on_press)
        self.slider.sliderReleased.connect(self._on_release)
        self.slider.space_pressed.connect(self._play_action.trigger)
        self.slider.pointed.connect(self._show_time_tip)
        self.speed.activated.connect(lambda index: timeline.set_speed(SPEEDS[index]))
        self._min_widths = {self.time: 440, self.speed: 540, self.wall: 620}
        """Minimum width of the bar, in pixels before scaling, at which each part is shown."""
        self._is_shown_playing: bool | None = None
        self._resumes_on_release = False
        self._refresh_timer = QTimer(self, interval=_REFRESH_MS)
        self._refresh_timer.timeout.connect(self.refresh)
        timeline.paused_changed.connect(self.refresh)
        timeline.cursor_changed.connect(self.refresh)
        self._shown_s = -1
        self.refresh()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = self.marks.theme = theme
        self._is_shown_playing = None
        self.refresh()

    def refresh(self) -> None:
        range_ns, origin_ns = self._timeline.range_ns, self._timeline.origin_ns
        has_range = range_ns is not None and origin_ns is not None
        self.slider.setEnabled(has_range)
        self.speed.setEnabled(has_range)
        if range_ns is not None and origin_ns is not None:
            first_s, last_s = (range_ns[0] - origin_ns) / 1e9, (range_ns[1] - origin_ns) / 1e9
            self.slider.show_range(first_s, last_s)
            at_s = max(first_s, (self._timeline.cursor_ns - origin_ns) / 1e9)
            is_dragged = self.slider.isSliderDown()
            if not is_dragged:
                self.slider.show_seconds(last_s if self._timeline.is_live else at_s)
            self._show_time(self.slider.seconds if is_dragged else at_s, first_s, last_s)
        else:
            self._set_text(self.time, "")
            self._set_text(self.wall, "")
        if self._timeline.speed in SPEEDS and self.speed.currentIndex() != SPEEDS.index(self._timeline.speed):
            self.speed.setCurrentIndex(SPEEDS.index(self._timeline.speed))
        self._show_play()
        self._update_refresh_timer()

    def follow_end(self) -> None:
        """Update after the timeline's range grew.

        At the live end, where only the time changes, updates at most once per second.
        """
        second = self._timeline.cursor_ns // 1_000_000_000
        if not self._timeline.is_live or second != self._shown_s:
            self._shown_s = second
            self.refresh()

    def minimumSizeHint(self) -> QSize:
        return QSize(_MIN_WIDTH, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._hide_parts_that_do_not_fit()

    def _hide_parts_that_do_not_fit(self) -> None:
        metrics = self.wall.fontMetrics()
        longer = metrics.horizontalAdvance(self.wall.text()) - metrics.horizontalAdvance(_SAMPLE_TIME)
        for part, width in self._min_widths.items():
            part.setVisible(self.width() >= scaled(width) + (max(longer, 0) if part is self.wall else 0))

    def _update_refresh_timer(self) -> None:
        """Refresh periodically only while the cursor moves by itself, so that an idle window uses no CPU time."""
        moves = not self._timeline.is_live and self._timeline.is_playing and self.isVisible()
        if moves and not self._refresh_timer.isActive():
            self._refresh_timer.start()
        elif not moves:
            self._refresh_timer.stop()

    def _show_play(self) -> None:
        is_playing = self._timeline.is_playing
        if is_playing is not self._is_shown_playing:
            self._is_shown_playing = is_playing
            self._play_action.setIcon(icon("pause" if is_playing else "play", self._theme.text, self._theme.border))
            self._play_action.setText("Pause" if is_playing else "Play")
            self._play_action.setToolTip(f"{self._play_action.text()} (Space)")

    def _show_time(self, seconds: float, first_s: float, last_s: float) -> None:
        origin_ns = self._timeline.origin_ns or 0
        length_s = last_s - first_s
        position = f"{time_text(seconds - first_s, length_s)} / {time_text(length_s, length_s)}"
        self._set_text(self.time, position)
        length_before = len(self.wall.text())
        self._set_text(self.wall, wall_text(origin_ns + round(seconds * 1e9)))
        if len(self.wall.text()) != length_before:
            self._hide_parts_that_do_not_fit()

    @staticmethod
    def _set_text(label: SteadyLabel, text: str) -> None:
        if label.text() != text:
            label.setText(text)

    def _show_time_tip(self, seconds: float) -> None:
        origin_ns = self._timeline.origin_ns
        if origin_ns is not None:
            position = self.slider.mapToGlobal(QPoint(round(self.slider.mapFromGlobal(self.cursor().pos()).x()), -34))
            QToolTip.showText(position, plain_tip(self.marks.text_at(seconds)), self.slider)

    def _seek_to_slider(self) -> None:
        origin_ns = self._timeline.origin_ns
        if origin_ns is not None:
            self._timeline.go_to(origin_ns + round(self.slider.seconds * 1e9))

    def _on_slider(self) -> None:
        if self.slider.isSliderDown() and not self._timeline.is_file and self._is_at_end:
            return  # goes live on release
        self._seek_to_slider()
        self.refresh()

    @property
    def _is_at_end(self) -> bool:
        return self.slider.value() >= self.slider.maximum()

    def _on_press(self) -> None:
        self._resumes_on_release = not self._timeline.is_live and self._timeline.is_playing
        self._timeline.pause()

    def _on_release(self) -> None:
        self._seek_to_slider()
        if self._resumes_on_release and not self._is_at_end:
            self._timeline.play()
        self.refresh()

    def _build(self, buttons: tuple[QAction, ...]) -> None:
        row = QHBoxLayout(self)
        row.setContentsMargins(10, 4, 12, 4)
        row.setSpacing(4)
        for action in buttons:
            row.addWidget(_TransportButton(action, self._play_action))
        row.addSpacing(6)
        row.addWidget(self.slider, 1)
        row.addSpacing(8)
        for label in (self.wall, self.time):
            label.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            row.addWidget(label)
            row.addSpacing(6)
        self.wall.setProperty("look", "muted")
        self.wall.setToolTip("Time of the state that is shown")
        self.time.setToolTip("Position on the timeline, and its length")
        self.speed.addItems([speed_text(speed) for speed in SPEEDS])
        self.speed.setAccessibleName("Speed")
        self.speed.setToolTip("Playback speed: slower with [, faster with ]")
        self.speed.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        row.addWidget(self.speed)


class _TransportButton(QToolButton):
    """Button that is triggered by Enter. Space plays or pauses, whichever button has the keyboard focus."""

    def __init__(self, action: QAction, play: QAction) -> None:
        super().__init__()
        self._play = play
        self.setDefaultAction(action)
        self.setAutoRaise(True)
        self.setIconSize(QSize(scaled(17), scaled(17)))
        self.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonIconOnly)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Space:
            self._play.trigger()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.click()
        else:
            super().keyPressEvent(event)

    def keyReleaseEvent(self, event: QKeyEvent) -> None:
        """Ignore the release of Space, which `keyPressEvent` has handled."""
        if event.key() != Qt.Key.Key_Space:
            super().keyReleaseEvent(event)


class SliderMarks(QWidget):
    """Transparent overlay of `slider` with bookmarks, alarms and the loop. Mouse events pass through to the slider."""

    def __init__(self, timeline: Timeline, bookmarks: ShownBookmarks, slider: TimeSlider) -> None:
        super().__init__(slider)
        self._timeline, self._bookmarks, self._slider = timeline, bookmarks, slider
        self.theme: Theme = DARK
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.setAttribute(Qt.WidgetAttribute.WA_NoSystemBackground)
        slider.installEventFilter(self)
        bookmarks.changed.connect(self.update)
        timeline.loop.changed.connect(self.update)
        self.resize(slider.size())

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize:
            self.resize(self._slider.size())
        return False

    def text_at(self, seconds: float) -> str:
        """Return the text of the nearest bookmark within a few pixels of `seconds`, or the formatted time if there is
        none.
        """
        origin_ns = self._timeline.origin_ns or 0
        time_ns = origin_ns + round(seconds * 1e9)
        x = self._slider.x_of(seconds)
        marks_nearby = [mark for mark in self._bookmarks.shown if abs(self._x(mark.time_ns) - x) <= _HIT_DISTANCE_PX]
        nearest = min(marks_nearby, key=lambda mark: abs(self._x(mark.time_ns) - x), default=None)
        return wall_text(time_ns) if nearest is None else mark_text(nearest)

    def paintEvent(self, event: QPaintEvent) -> None:
        loop, slider = self._timeline.loop, self._slider
        if self._timeline.origin_ns is None or not (self._bookmarks.shown or loop.begin_ns or loop.end_ns):
            return
        painter = QPainter(self)
        left, right = (None if at is None else self._x(at) for at in (loop.begin_ns, loop.end_ns))
        paint_loop(painter, left, right, QRectF(0, 3, self.width(), self.height() - 6), self.theme)
        last_x, top = -_MIN_SIGN_DISTANCE_PX, self.height() / 2 - _SIGN_HEIGHT - 3
        min_x, max_x = slider.x_of(slider.minimum_s), slider.x_of(slider.maximum_s)
        for mark in self._bookmarks.shown:
            x = self._x(mark.time_ns)
            if min_x - 1 <= x <= max_x + 1 and x - last_x >= _MIN_SIGN_DISTANCE_PX:
                paint_sign(painter, x, top, _SIGN_HEIGHT, is_note=mark.is_user_note, theme=self.theme)
                last_x = x
        painter.end()

    def _x(self, time_ns: int) -> float:
        return self._slider.x_of((time_ns - (self._timeline.origin_ns or 0)) / 1e9)
