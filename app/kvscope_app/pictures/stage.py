"""One view on a recording without a window on any screen: it is put at moments, and pictures of it are taken.

Owns the session and the view. The view is the window's own; Qt's `offscreen` platform shows it to nobody. Time is not
the machine's: it goes on when `play_to` says so, and what lights up in the view fades by the video's time.
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
from kvscope_app.look.theme import Theme
from kvscope_app.look.theming.apply_theme import apply_theme
from kvscope_app.pictures.caption import caption_of
from kvscope_app.pictures.content_fit import overflow
from kvscope_app.pictures.picture import PictureLook, is_control, picture_of
from kvscope_app.session.session import Session
from kvscope_app.views.base import View
from kvscope_app.views.docks import DOCKS
from kvscope_app.views.page_map.page_map_view import PageMapView
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.printable import print_text
from kvscope_telemetry.recordings.reader import Recording

PATIENCE_S: Final = 60.0
"""Nothing that is waited for takes longer, but the overview of a recording without one: that tells how far it is."""
_MOST_S: Final = 2.0
"""A longer way than this is jumped, where whatever happened in between would not be seen anyway."""
_TICK_NS: Final = 100_000_000
_OF_NO_WINDOW: Final = "This plugin does not support"
_SETTLE_S: Final = 0.35
"""For what views work out in turns of the event loop, after what another process worked out for them."""
_MAX_FITS: Final = 8
"""A splitter gives a list only its share of what the view grows by, so that it takes several times."""
_TURN_S: Final = 0.05
"""What a turn counts for at most: while the machine was elsewhere the view had no time."""


def offscreen_application(scale: int = 1) -> QApplication:
    """The application, with no screen; `scale` pixels for one. A process has one: of a second call the first holds."""
    app = QApplication.instance()
    if isinstance(app, QApplication):
        return app
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QT_SCALE_FACTOR"] = str(scale)
    qInstallMessageHandler(_pass_on)
    return make_application()


def _pass_on(_kind: object, _context: object, words: str) -> None:
    """What Qt says, but for what it says of a window that nobody sees."""
    if not words.startswith(_OF_NO_WINDOW):
        print_text(words, file=sys.stderr)


class Stage:
    """`view` of `recording`, in `theme` and of `size`; `close` ends what it began."""

    def __init__(
        self, recording: Recording, view: str, size: QSize, theme: Theme, watch: Callable[[float], bool] | None = None
    ) -> None:
        self.begin_share = 0.0
        """Of the whole work, what it took to get here."""
        self.now_ns = 0
        """The time by which views fade what lit up."""
        self._clock_ns = 0
        self._watch = watch
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
        """Give the view `size`. Raises BadInput, with the smallest size that it accepts, if that is too small."""
        self.view.resize(size)
        if self.view.size() != size:
            least = self.view.size()
            raise BadInput(
                f"{size.width()}x{size.height()} is too small for a picture of {self.view.title}: "
                f"at least {least.width()}x{least.height()}"
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
        """A view on time shows this range."""
        start_ns = self._source.recording.start_ns
        self.view.show_range(start_ns + round(from_s * 1e9), start_ns + round(until_s * 1e9))

    def go_to(self, seconds: float) -> None:
        """Be there at once; whatever is worked out in turns is waited for."""
        self._source.pause()
        self._source.seek(seconds, with_past=False)
        self._wait(lambda: not self._source.is_seeking)
        self._session.poll()
        begun_s = looked_s = time.monotonic()
        settled_s = 0.0
        while settled_s < _SETTLE_S:
            self.view.draw_all()
            self._app.processEvents()
            time.sleep(0.005)
            looked_s, before_s = time.monotonic(), looked_s
            is_waited_for = not self.view.is_settled and looked_s - begun_s < PATIENCE_S
            settled_s = 0.0 if is_waited_for else settled_s + min(looked_s - before_s, _TURN_S)

    def play_to(self, seconds: float) -> None:
        """Go on to there, through all that happens on the way."""
        way_s = seconds - self._source.position
        if not 0 <= way_s <= _MOST_S:
            self._source.seek(seconds, with_past=False)
            self._wait(lambda: not self._source.is_seeking)
        else:
            self._play(seconds)
        self._session.poll()
        self.view.draw_all()
        self._app.processEvents()

    def picture(self, look: PictureLook) -> QImage:
        """Of the view as it is now."""
        focus = self._app.focusWidget()
        if focus is not None:  # nobody types here
            focus.clearFocus()
        return picture_of(self.view, look)

    def caption(self, range_s: tuple[float, float] | None = None) -> str:
        """Model, time and range, for the line below a picture."""
        return caption_of(self._session, self.view.title, range_s)

    def close(self) -> None:
        """End it all."""
        self.view.close()
        self.view.shut_down()
        self.view.deleteLater()
        self._session.close()
        self._session.deleteLater()
        self._app.sendPostedEvents(None, 0)

    # private

    def _make_view(self, name: str) -> View:
        name = name.replace("-", "_")
        if name == "page_map":
            return PageMapView(self._session)
        return next(spec for spec in DOCKS if spec.name == name).view_class()(self._session)

    def _hide_controls(self) -> None:
        """Give the space of buttons and fields to what a picture is for."""
        for widget in self.view.findChildren(QWidget):
            if is_control(widget) and not isinstance(widget, QScrollBar):
                widget.hide()

    def _read_overview(self) -> None:
        """Of a recording without summaries it takes as long as reading all of it."""
        while not self._session.is_overview_whole:
            self._session.poll()
            share = self._session.overview_share
            if share is not None and self._watch is not None:
                self.begin_share = 0.5
                self._watch(share * self.begin_share)
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
        """Why the recording cannot be read any further."""
        reason = self._source.status.reason
        return "" if reason in ("", "paused", "at the end") else reason

    def _wait(self, predicate: Callable[[], bool]) -> None:
        if not self._source.wait(lambda: predicate() or bool(self._failure), PATIENCE_S) or self._failure:
            raise KvscopeError(f"{self._source.name}: {self._failure or 'nothing more can be read'}")
