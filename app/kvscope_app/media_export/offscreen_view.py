"""Shows one view of a recording offscreen at chosen moments, and takes pictures of it.

Owns the session and the view. The view's class is the one that the window uses, on Qt's `offscreen` platform. The
recording does not follow the machine's clock: it advances only in `play_to`, and highlights fade by the video's time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from PySide6.QtCore import QSize, Qt, qInstallMessageHandler
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QApplication, QScrollBar, QWidget

from kvscope_app.application import make_application
from kvscope_app.media_export.caption import caption_of
from kvscope_app.media_export.content_fit import overflow
from kvscope_app.media_export.picture import PictureStyle, is_control, picture_of
from kvscope_app.session.session import Session
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.theming.apply_theme import apply_theme
from kvscope_app.views.base import View
from kvscope_app.views.docks import DOCKS
from kvscope_app.views.page_map.page_map_view import PageMapView
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.printable import print_text
from kvscope_telemetry.recordings.reader import Recording

READY_TIMEOUT_S: Final = 60.0
"""Maximum seconds to wait for a seek, a played frame, or a view's data.

Reading the overview has no limit, because a recording without summaries must be read completely.
"""
_MAX_PLAYED_GAP_S: Final = 2.0
"""Maximum gap between two frames, in seconds of the recording, that is played.

A longer gap is jumped over, because its highlights would have faded before the next frame.
"""
_TICK_NS: Final = 100_000_000
"""Maximum advance of the recording's playback clock, in ns, between two waits for a frame."""
_OVERVIEW_SHARE: Final = 0.5
"""Assumed fraction of the whole work that reading a recording without summaries takes. The rest are the frames."""
_OFFSCREEN_WARNING: Final = "This plugin does not support"
_SETTLE_S: Final = 0.35
"""Seconds of event processing that a view gets after it has loaded its data, to finish its work."""
_MAX_FITS: Final = 8
"""Maximum number of resizes to fit the content. Several are needed, because a splitter gives a list only part of added
space.
"""
_MAX_TURN_S: Final = 0.05
"""Maximum seconds that count for one pass of the event loop.

On a busy machine, most of a longer pass may have gone to other processes.
"""


def offscreen_application(scale: int = 1) -> QApplication:
    """Return the existing application, or create one on Qt's `offscreen` platform.

    `scale` is the number of pixels per logical pixel. An existing application keeps its scale.
    """
    app = QApplication.instance()
    if isinstance(app, QApplication):
        return app
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QT_SCALE_FACTOR"] = str(scale)
    qInstallMessageHandler(_print_message)
    return make_application()


def _print_message(_kind: object, _context: object, text: str) -> None:
    if not text.startswith(_OFFSCREEN_WARNING):
        print_text(text, file=sys.stderr)


class OffscreenView:
    """Shows `view` of `recording` offscreen, in `theme` and with `size` in pixels. Call `close` at the end.

    `report_progress` is called with the fraction of the whole work that is done while the recording is read. Its result
    is ignored: this part of the work cannot be cancelled.

    Raises BadInput if `size` is too small for the view.
    """

    def __init__(
        self,
        recording: Recording,
        view: str,
        size: QSize,
        theme: Theme,
        report_progress: Callable[[float], bool] | None = None,
    ) -> None:
        self.setup_share = 0.0
        """Fraction of the whole work, 0 to 1, that is done before the first frame."""
        self.now_ns = 0
        """Video time in ns, by which highlights in the view fade. Set by the caller for each frame."""
        self._clock_ns = 0
        """Clock of the playback in ns. It advances only in `play_to`, as far as the recording must be played."""
        self._report_progress = report_progress
        self._app = offscreen_application()
        self._source = PlaybackSource(recording, is_playing=False, clock=lambda: self._clock_ns)
        self._session = Session(self._source)
        apply_theme(self._app, theme)
        self._read_overview()
        self.view = self._make_view(view)
        self.view.apply_theme(theme)
        self.view.use_clock(lambda: self.now_ns)
        self.view.setAttribute(Qt.WidgetAttribute.WA_DontShowOnScreen)
        self.view.show()
        self._hide_controls()
        try:
            self.resize(size)
        except BadInput:
            self.close()
            raise

    def resize(self, size: QSize) -> None:
        """Resize the view. Raises BadInput, with the smallest accepted size, if `size` is too small."""
        self.view.resize(size)
        if self.view.size() != size:
            smallest = self.view.size()
            raise BadInput(
                f"{size.width()}x{size.height()} is too small for a picture of {self.view.title}: "
                f"at least {smallest.width()}x{smallest.height()}"
            )

    def fit_contents(self, largest: QSize) -> None:
        """Enlarge the view, up to `largest`, until all of its content is visible without scrolling."""
        for _ in range(_MAX_FITS):
            hidden = overflow(self.view)
            size = (self.view.size() + hidden).boundedTo(largest)
            if size == self.view.size():
                break
            self.view.resize(size)
            self._app.processEvents()

    def show_range(self, from_s: float, until_s: float) -> None:
        """Show a time range, in seconds of the recording. Views without a time axis ignore it."""
        start_ns = self._source.recording.start_ns
        self.view.show_range(start_ns + round(from_s * 1e9), start_ns + round(until_s * 1e9))

    def go_to(self, seconds: float) -> None:
        """Jump to a time in seconds of the recording and wait until the view has settled."""
        self._source.pause()
        self._source.seek(seconds, with_past=False)
        self._wait(lambda: not self._source.is_seeking)
        self._session.poll()
        start_s = previous_s = time.monotonic()
        settled_s = 0.0
        while settled_s < _SETTLE_S:
            self.view.draw_all()
            self._app.processEvents()
            time.sleep(0.005)
            now_s = time.monotonic()
            is_loading = not self.view.is_loaded and now_s - start_s < READY_TIMEOUT_S
            settled_s = 0.0 if is_loading else settled_s + min(now_s - previous_s, _MAX_TURN_S)
            previous_s = now_s

    def play_to(self, seconds: float) -> None:
        """Play up to a time in seconds of the recording, so that highlights appear.

        Jump to the time instead if it is before the shown time, or more than `_MAX_PLAYED_GAP_S` after it.
        """
        gap_s = seconds - self._source.position
        if not 0 <= gap_s <= _MAX_PLAYED_GAP_S:
            self._source.seek(seconds, with_past=False)
            self._wait(lambda: not self._source.is_seeking)
        else:
            self._play(seconds)
        self._session.poll()
        self.view.draw_all()
        self._app.processEvents()

    def picture(self, style: PictureStyle) -> QImage:
        focus = self._app.focusWidget()
        if focus is not None:  # no focus frames or text cursors in pictures
            focus.clearFocus()
        return picture_of(self.view, style)

    def caption(self, range_s: tuple[float, float] | None = None) -> str:
        return caption_of(self._session, self.view.title, range_s)

    def close(self) -> None:
        self.view.close()
        self.view.shut_down()
        self.view.deleteLater()
        self._session.close()
        self._session.deleteLater()
        self._app.sendPostedEvents(None, 0)

    # Private methods

    def _make_view(self, name: str) -> View:
        name = name.replace("-", "_")
        if name == "page_map":
            return PageMapView(self._session)
        return next(spec for spec in DOCKS if spec.name == name).view_class()(self._session)

    def _hide_controls(self) -> None:
        for widget in self.view.findChildren(QWidget):
            if is_control(widget) and not isinstance(widget, QScrollBar):
                widget.hide()

    def _read_overview(self) -> None:
        """Wait for the overview. For a recording without summaries, this reads the whole file."""
        while not self._session.is_overview_complete:
            self._session.poll()
            share = self._session.overview_share
            if share is not None and self._report_progress is not None:
                self.setup_share = _OVERVIEW_SHARE
                self._report_progress(share * self.setup_share)
            time.sleep(0.01)

    def _play(self, seconds: float) -> None:
        target_s = min(seconds, self._source.duration)
        self._source.play()
        while self._source.position < target_s - 1e-9 and not self._failure:
            before_s = self._source.position
            self._clock_ns += min(_TICK_NS, max(round((target_s - before_s) * 1e9), 1))
            self._wait(partial(self._is_past, before_s))
        self._source.pause()

    def _is_past(self, seconds: float) -> bool:
        return self._source.position > seconds

    @property
    def _failure(self) -> str:
        reason = self._source.status.reason
        return "" if reason in ("", "paused", "at the end") else reason

    def _wait(self, predicate: Callable[[], bool]) -> None:
        if not self._source.wait(lambda: predicate() or bool(self._failure), READY_TIMEOUT_S) or self._failure:
            raise KvscopeError(f"{self._source.name}: {self._failure or 'nothing more can be read'}")
