"""Contents of a comparison window: its two sessions, its widgets and their layout.

Owns the sessions and widgets that the window's actions use. Must not depend on the modules with these actions.
"""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QMainWindow, QSplitter, QVBoxLayout, QWidget

from kvscope_app.compare.align_bar import AlignBox
from kvscope_app.compare.curves_view import SIDES, CurvesView
from kvscope_app.compare.figures_view import FiguresView
from kvscope_app.compare.session_pair import SessionPair
from kvscope_app.compare.side_view import SideView
from kvscope_app.session.session import Session
from kvscope_app.ui.banner import Banner
from kvscope_app.ui.passing_strip import FloatingStrips
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.ui.widget_factories import label
from kvscope_app.views.page_map.color_modes import ColorMode
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording


class CompareBody(QMainWindow):
    def __init__(self, a: Recording, b: Recording, names: tuple[str, str], themes: ThemeManager) -> None:
        super().__init__()
        self.themes = themes
        self.setWindowTitle(f"{names[0]} | {names[1]} – kvscope")
        self.sessions = [Session(PlaybackSource(each, is_playing=False), self) for each in (a, b)]
        self.pair = SessionPair(self.sessions[0], self.sessions[1], self)
        self.sides = [SideView(*each) for each in zip(self.sessions, names, SIDES, strict=True)]
        self.curves = CurvesView(self.pair)
        self.figures = FiguresView()
        self.align = AlignBox(self.pair)
        self.banner = Banner(self)
        self.statusBar()  # created now, or the first message would move everything

    def set_mode(self, mode: ColorMode) -> None:
        for side in self.sides:
            side.map.set_mode(mode)

    def zoom_by(self, steps: int) -> None:
        """Zoom both page maps: 1 in, -1 out, 0 to fit. Used unless a focused view handles zooming itself."""
        for side in self.sides:
            (side.map.fit_all, side.map.zoom_in, side.map.zoom_out)[steps]()

    def lay_out(self, bar: QWidget) -> None:
        body = QSplitter(Qt.Orientation.Vertical)
        body.addWidget(self._maps(bar))
        body.addWidget(self._below())
        body.setSizes([500, 500])
        body.setObjectName("body")
        body.setChildrenCollapsible(False)
        self.setCentralWidget(body)

    def _maps(self, bar: QWidget) -> QWidget:
        maps = QSplitter(Qt.Orientation.Horizontal)
        maps.setObjectName("maps")
        for side in self.sides:
            maps.addWidget(side)
        row = QHBoxLayout()
        row.setSpacing(0)
        row.addWidget(bar, 1)
        row.addWidget(self._align_frame())
        upper_half = QWidget()
        column = QVBoxLayout(upper_half)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(maps, 1)
        column.addLayout(row)
        FloatingStrips(upper_half, maps).add(self.banner)
        return upper_half

    def _below(self) -> QSplitter:
        below = QSplitter(Qt.Orientation.Horizontal)
        below.addWidget(self.curves)
        below.addWidget(self.figures)
        below.setSizes([430, 570])
        below.setObjectName("below")
        return below

    def _align_frame(self) -> QFrame:
        frame = QFrame()
        frame.setProperty("look", "playback")
        row = QHBoxLayout(frame)
        row.setContentsMargins(6, 4, 12, 4)
        row.addWidget(label("Align by", "muted"))
        row.addWidget(self.align)
        return frame
