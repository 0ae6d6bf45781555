"""Comparison window: two page maps over one playback bar, their curves, and a table of key figures.

Connects the parts of `CompareBody` and limits how often they are refreshed. The recording of a live engine is its
recent history, which grows while it is shown.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from PySide6.QtCore import QTimer, Signal
from PySide6.QtGui import QCloseEvent, QShowEvent

from kvscope_app.actions.action_registry import Actions
from kvscope_app.compare.compare_actions import add_compare_actions
from kvscope_app.compare.compare_body import CompareBody
from kvscope_app.playback.playback_bar import PlaybackBar
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.ui.window_size import resize_to_default
from kvscope_app.views.page_map.color_modes import ColorMode
from kvscope_app.views.refresher import Refresher
from kvscope_telemetry.exports.comparison.alignment import Alignment
from kvscope_telemetry.exports.comparison.comparison import Run, compare
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.recordings.reader import Recording

_DEBOUNCE_MS: Final = 400
_MIN_INTERVAL_RATIO: Final = 20
"""Minimum ratio of the refresh interval to the duration of a refresh.

Refreshing takes 50 ms per run with hours of data, so at most 5 % of the time is spent on it.
"""
_TEXT_INTERVAL_MS: Final = 100
_BUTTONS: Final = ("to_start", "frame_back", "play", "frame_forward", "to_end")


class CompareWindow(CompareBody):
    """Window that compares recordings `a` and `b`, which are labelled `names` and closed together with the window."""

    closing = Signal(object)
    """Emitted with the window itself when it is about to close."""

    def __init__(self, a: Recording, b: Recording, names: tuple[str, str], themes: ThemeManager) -> None:
        super().__init__(a, b, names, themes)
        self.actions_by_name = Actions(self, themes.settings)
        add_compare_actions(self, self.actions_by_name)
        self.bar = PlaybackBar(self.pair, self.pair.bookmarks, tuple(self.actions_by_name[name] for name in _BUTTONS))
        self._refreshers = [Refresher(session, self) for session in self.sessions]
        self._refresh_timer = QTimer(self, singleShot=True, interval=_DEBOUNCE_MS)
        self._text_timer = QTimer(self, singleShot=True, interval=_TEXT_INTERVAL_MS)
        self.lay_out(self.bar)
        self._connect()
        self._apply_theme(themes.theme)
        resize_to_default(self)
        for session in self.sessions:
            session.start()

    def set_mode(self, mode: ColorMode) -> None:
        super().set_mode(mode)
        self.actions_by_name.refresh()

    def refresh_overview(self) -> None:
        start_ns = time.monotonic_ns()
        self.align.refresh()
        self.curves.refresh()
        self.refresh_figures()
        duration_ms = (time.monotonic_ns() - start_ns) // 1_000_000
        self._refresh_timer.setInterval(max(_DEBOUNCE_MS, _MIN_INTERVAL_RATIO * duration_ms))

    def refresh_figures(self) -> None:
        runs = self._runs()
        if runs is not None:
            self.figures.show_comparison(compare(*runs))

    # Qt events

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.sides[0].map.canvas.setFocus()

    def closeEvent(self, event: QCloseEvent) -> None:
        self.pair.pause()
        for refresher, side in zip(self._refreshers, self.sides, strict=True):
            refresher.remove(side.map)
            side.map.shut_down()
        for session in self.sessions:
            session.close()
        self.closing.emit(self)
        super().closeEvent(event)

    # private

    def _runs(self) -> tuple[Run, Run] | None:
        """Return runs A and B for the table of figures; None if either has no overview, or no data in the visible
        range.
        """
        visible = self.pair.shared_zoom.span if self.figures.covers_visible_range else None
        runs = []
        for side in self.pair.sides:
            player = side.session.timeline.player
            if player is None or not len(side.session.overview):
                return None
            first, last = side.range_ns
            if visible is not None:
                first, last = max(first, visible.begin_ns), min(last, visible.end_ns)
            if last <= first:
                return None
            span = Span(player.recording.start_ns, first + side.offset_ns, last + side.offset_ns)
            runs.append(Run(player.recording, side.session.overview, span))
        return runs[0], runs[1]

    def _on_moment(self, index: int, seconds: float) -> None:
        """Align the chosen time of run `index` (0 for A, 1 for B) with the time shown of the other run."""
        range_ns = self.sessions[index].timeline.range_ns
        if range_ns is None:
            return
        a_ns, b_ns = (session.timeline.cursor_ns for session in self.sessions)
        chosen_ns = range_ns[0] + round(seconds * 1e9)
        a_ns, b_ns = (chosen_ns, b_ns) if index == 0 else (a_ns, chosen_ns)
        self.pair.align(Alignment.of(a_ns, b_ns), a_ns)
        self.align.show_chosen()

    def show_texts(self) -> None:
        for view, side in zip(self.sides, self.pair.sides, strict=True):
            view.show_at(side, self.pair.cursor_ns)

    def _on_cursor(self) -> None:
        if not self._text_timer.isActive():
            self._text_timer.start()

    def _on_overview(self) -> None:
        if not self._refresh_timer.isActive():
            self._refresh_timer.start()

    def _on_visible_range(self) -> None:
        if self.figures.covers_visible_range:
            self.refresh_figures()

    def _connect(self) -> None:
        parts = zip(self.sessions, self.sides, self._refreshers, strict=True)
        for index, (session, side, refresher) in enumerate(parts):
            refresher.add_view(side.map)
            session.overview_changed.connect(self._on_overview)
            session.status_changed.connect(self.bar.follow_end)
            session.status_changed.connect(self._on_cursor)  # shows the progress of reading a recording, and its growth
            side.map.mode_changed.connect(self.set_mode)
            side.moment_chosen.connect(partial(self._on_moment, index))
        self.pair.cursor_changed.connect(self._on_cursor)
        self.pair.aligned.connect(self._on_overview)
        self.align.chosen.connect(self.pair.align)
        self.pair.shared_zoom.changed.connect(self._on_visible_range)
        self.figures.range_chosen.connect(self.refresh_figures)
        self._refresh_timer.timeout.connect(self.refresh_overview)
        self._text_timer.timeout.connect(self.show_texts)
        self.themes.changed.connect(self._apply_theme)

    def _apply_theme(self, theme: Theme) -> None:
        self.actions_by_name.apply_theme(theme)
        for side in self.sides:
            side.apply_theme(theme)
        for part in (self.curves, self.figures, self.bar, self.banner):
            part.apply_theme(theme)
        for refresher in self._refreshers:
            refresher.touch_all()
