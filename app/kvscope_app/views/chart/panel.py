"""Chart panel: a plot below a line with its title and current values. Owns the pyqtgraph items and their colours.

Curves are passed in as arrays. Must not depend on their source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import QEvent, QPointF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QContextMenuEvent, QPaintEngine, QPainter, QPen, QTransform
from PySide6.QtWidgets import QMenu, QStyleOptionGraphicsItem, QVBoxLayout, QWidget

from kvscope_app.session.stop_bands import StopBand
from kvscope_app.ui.announce import announce, is_screen_reader_active
from kvscope_app.ui.fonts import sans
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import Theme, mix
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.chart.axes import TimeAxis, ValueAxis, color_axis
from kvscope_app.views.chart.chart_legend import ChartLegend, LegendEntry
from kvscope_app.views.chart.curves import FloatArray, close_areas, decimate, join_near, nice_ceiling
from kvscope_app.views.chart.gap_bands import GapBands
from kvscope_app.views.chart.peak_line import CurvePeak, PeakLine
from kvscope_app.views.chart.plot import Plot

_TEXT_PADDING: Final = 4.0
PLOT_MIN_HEIGHT = 64
TEXT_MARGIN = 7
"""Margin of half a line of text in pixels, because the outermost axis labels extend beyond the plot."""
_MIN_FILLED_SHARE = 0.45
_KEY_PAN_SHARE = 0.1
"""Fraction of the visible time by which an arrow key moves the time range."""
_KEY_CURSOR_SHARE = 0.01
"""Fraction of the visible time by which Shift and an arrow key move the cursor line."""
_KEY_ZOOM_FACTOR = 0.5
_AREA_FLOOR_SHARE = 0.1
"""Distance from the bottom of the plot down to the lower edge of filled areas, as a fraction of the plot's height."""


@dataclass(frozen=True, slots=True)
class CurveSpec:
    """Appearance of a curve. `color` is the name of a theme colour, or an index into `Theme.series`."""

    name: str
    label: str
    color: str | int
    filled: bool = False
    dashed: bool = False

    def color_of(self, theme: Theme) -> str:
        return theme.series[self.color] if isinstance(self.color, int) else str(getattr(theme, self.color))


@dataclass(frozen=True, slots=True)
class PlotMark:
    x: float
    text: str
    timed_event: object = None
    """Event that `mark_chosen` emits on a click; None if the mark represents events that were only counted."""


class ChartPanel(QWidget):
    """Chart with title, values and plot. Coordinates: x in seconds, y from 0 to `top` or to a round number above the
    data.
    """

    hovered = Signal(object)
    """Emitted with the time in seconds at the pointer, or None when the pointer leaves."""
    chosen = Signal(float)
    """Emitted with the time in seconds at which the user clicked."""
    peak_chosen = Signal(float)
    """Emitted with the time in seconds of a curve's maximum that the user clicked."""
    mark_chosen = Signal(object)
    range_dragged = Signal(float, float)
    """Emitted with the first and last visible second when the user pans or zooms."""
    fit_requested = Signal()
    _is_built = False

    def __init__(
        self,
        title: str,
        curves: Sequence[CurveSpec],
        axis_text: Callable[[float], str],
        *,
        top: float | None = None,
        join_gap_s: float = 0.0,
        time_axis: TimeAxis | None = None,
    ) -> None:
        super().__init__()
        self.title = title
        self.curves = tuple(curves)
        self.setAccessibleName(title)
        self._fixed_top = top
        self._join_gap_s = join_gap_s
        self._top = 0.0
        self._point_s = 0.0
        self._has_time_labels = True
        self.legend = ChartLegend(title, [LegendEntry(c.name, c.label, c.dashed) for c in self.curves])
        self.peak_line = PeakLine()
        self._time_axis = time_axis or TimeAxis()
        self.plot = Plot(ValueAxis(axis_text), self._time_axis)
        self.dot_items: dict[str, pg.ScatterPlotItem] = {}
        """Dots, by curve name, for points that no line joins to another point."""
        self.curve_items = {curve.name: self._add_curve(curve) for curve in self.curves}
        self._filled = {curve.name: curve.filled for curve in self.curves}
        self.gap_bands = GapBands()
        self.stop_bands = StopBands()
        self.mark_points = pg.ScatterPlotItem(symbol="t1", size=8, pen=None, hoverable=True, tip=_mark_tip)
        self.shown_marks: tuple[float, tuple[PlotMark, ...]] = (0.0, ())
        self.cursor_line = pg.InfiniteLine(angle=90, movable=False)
        self.session_cursor_line = pg.InfiniteLine(angle=90, movable=False)
        self._set_up_plot()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        layout.addWidget(self.legend)
        layout.addWidget(self.peak_line)
        layout.addWidget(self.plot, 1)
        self._is_built = True

    def sizeHint(self) -> QSize:
        return QSize(320, 150)

    def show_time(self, first_s: float, last_s: float, now_s: float | None) -> None:
        """Show the time from `first_s` to `last_s`. `now_s` is the right edge while the chart follows the present, else
        None.
        """
        self._time_axis.now_s = now_s
        view = self.plot.view_box
        view.blockSignals(True)
        view.setXRange(first_s, last_s, padding=0)
        view.blockSignals(False)
        self._time_axis.setRange(first_s, last_s)

    def finish_layout(self) -> None:
        """Complete the layout now. Otherwise pyqtgraph does it in the next paint, and then paints twice."""
        self.plot.scene().prepareForPaint()

    def zoom_by(self, steps: int) -> None:
        """Zoom the time by `steps` around the cursor line or the middle. If `steps` is 0, follow the present again."""
        if not steps:
            self.fit_requested.emit()
            return
        (first, last), _ = self.plot.view_box.viewRange()
        share = _KEY_ZOOM_FACTOR**steps
        middle = float(self.cursor_line.value()) if self.cursor_line.isVisible() else (first + last) / 2
        self.range_dragged.emit(middle - (middle - first) * share, middle + (last - middle) * share)

    def clock_text(self, x: float) -> str:
        return self._time_axis.clock_text(x)

    def show_time_labels(self, is_shown: bool) -> None:
        self._time_axis.show_labels(is_shown)
        self._has_time_labels = is_shown
        self._update_margins()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange and self._is_built:
            self._update_margins()

    def _update_margins(self) -> None:
        margin = scaled(TEXT_MARGIN)
        self.plot.setMinimumHeight(scaled(PLOT_MIN_HEIGHT))
        self.plot.set_margins(margin, 0 if self._has_time_labels else margin)

    def show_curve(self, name: str, x: FloatArray, y: FloatArray, phase: int) -> float:
        """Draw a curve and return its maximum, or 0 if no value is known.

        Args:
            name: Name of the curve in `curves`.
            x: Times in seconds, shape (n,).
            y: Values, shape (n,). NaN where unknown.
            phase: Index of the first point in the whole series, see `decimate`.
        """
        self._point_s = float(x[-1] - x[0]) / (x.size - 1) if x.size > 1 else 0.0
        x, y = decimate(x, y, max(self.plot.width() - 50, 50), phase)
        step = (x[-1] - x[0]) / max(x.size - 1, 1) if x.size else 0.0
        x, y, is_joined = join_near(x, y, max(self._join_gap_s, 3.5 * step))
        is_alone = ~is_joined & ~np.roll(is_joined, 1)
        self.dot_items[name].setData(x[is_alone], y[is_alone])
        highest = float(y.max()) if y.size else 0.0
        if self._filled[name]:
            floor = -_AREA_FLOOR_SHARE * max(highest, self._fixed_top or self._top, 1.0)
            x, y, is_joined = close_areas(x, y, is_joined, floor)
        connect = "all" if is_joined[:-1].all() else is_joined.astype(np.uint8)
        self.curve_items[name].setData(x, y, connect=connect, skipFiniteCheck=True)
        return highest

    def fit(self, highest: float) -> None:
        """Set the upper end of the value axis to a round number above `highest`. It is lowered only if it is much too
        high.
        """
        if self._fixed_top is not None:
            return
        if highest <= 0:
            return  # an axis from zero to zero would be useless
        if highest > self._top or highest < self._top * _MIN_FILLED_SHARE:
            self._top = nice_ceiling(highest * 1.04)
            self.plot.view_box.setYRange(0, self._top, padding=0)

    def show_gaps(self, gaps: Sequence[tuple[float, float]]) -> None:
        self.gap_bands.show_gaps(gaps)

    def show_stops(self, bands: Sequence[StopBand]) -> None:
        self.stop_bands.show_bands(bands)

    def show_peaks(self, peaks: Sequence[CurvePeak]) -> None:
        self.peak_line.show_peaks(peaks)

    def show_marks(self, marks: Sequence[PlotMark]) -> None:
        y = self._top * 0.06 if self._fixed_top is None else self._fixed_top * 0.06
        marks_at = (y, tuple(marks))
        if marks_at != self.shown_marks:
            self.shown_marks = marks_at
            self.mark_points.setData([mark.x for mark in marks], [y] * len(marks), data=list(marks))

    def show_cursor(self, x: float | None) -> None:
        """Show the line at the pointer, which all panels share, at `x`. None hides the line."""
        self.cursor_line.setVisible(x is not None)
        if x is not None:
            self.cursor_line.setPos(x)

    def show_session_cursor(self, x: float | None) -> None:
        """Show the session's cursor at `x`. None hides the cursor, because it is at the right edge."""
        self.session_cursor_line.setVisible(x is not None)
        if x is not None:
            self.session_cursor_line.setPos(x)

    def apply_theme(self, theme: Theme) -> None:
        self.theme = theme
        self.plot.theme = theme
        self.plot.setBackground(theme.base)
        for axis in self.plot.axes:
            color_axis(axis, theme)
        for curve in self.curves:
            color = curve.color_of(theme)
            style = Qt.PenStyle.DashLine if curve.dashed else Qt.PenStyle.SolidLine
            self.curve_items[curve.name].setPen(pg.mkPen(color, width=1, style=style))
            self.dot_items[curve.name].setBrush(pg.mkBrush(color))
            if curve.filled:
                self.curve_items[curve.name].setBrush(pg.mkBrush(mix(theme.base, color, 0.45)))
        self.mark_points.setBrush(pg.mkBrush(theme.bad))
        self.session_cursor_line.setPen(pg.mkPen(theme.accent))
        self.cursor_line.setPen(pg.mkPen(theme.muted, style=Qt.PenStyle.DashLine))
        self.gap_bands.set_color(mix(theme.base, theme.muted, 0.10))
        self.stop_bands.apply_theme(theme)
        self.peak_line.apply_theme(theme)
        self.legend.apply_theme(theme, {curve.name: curve.color_of(theme) for curve in self.curves})

    def _add_curve(self, curve: CurveSpec) -> CurveItem:
        item = CurveItem(antialias=False, fillLevel=0.0 if curve.filled else None)
        self.plot.view_box.addItem(item)
        self.dot_items[curve.name] = pg.ScatterPlotItem(symbol="o", size=4, pen=None)
        self.plot.view_box.addItem(self.dot_items[curve.name])
        return item

    def _set_up_plot(self) -> None:
        plot, view = self.plot, self.plot.view_box
        view.setMouseEnabled(x=True, y=False)
        view.setDefaultPadding(0.0)
        view.disableAutoRange()
        self._update_margins()
        view.setYRange(0, self._fixed_top or 1.0, padding=0)
        for item in (self.gap_bands, self.stop_bands, self.mark_points, self.cursor_line, self.session_cursor_line):
            view.addItem(item, ignoreBounds=True)
        self.cursor_line.hide()
        self.session_cursor_line.hide()
        plot.scene().sigMouseMoved.connect(self._on_mouse_moved)
        plot.scene().sigMouseClicked.connect(self._on_clicked)
        view.sigRangeChangedManually.connect(self._on_dragged)
        plot.keyed.connect(self._on_key)
        self.peak_line.chosen.connect(self.peak_chosen)
        plot.focused.connect(self._describe)
        self.legend.changed.connect(self._on_values)
        plot.setAccessibleName(f"{self.title}: chart")

    def _on_values(self) -> None:
        if self.plot.hasFocus() or is_screen_reader_active():
            self._describe()

    def _describe(self) -> None:
        self.plot.setAccessibleDescription(self._sentence())

    def _sentence(self) -> str:
        time_text = f"{self.clock_text(float(self.cursor_line.value()))}: " if self.cursor_line.isVisible() else ""
        stop_text = self.stop_bands.text_at(float(self.cursor_line.value())) if self.cursor_line.isVisible() else ""
        return time_text + self.legend.description + (f", engine {stop_text}" if stop_text else "")

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        if not self.peak_line.peaks:
            event.ignore()
            return
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        for peak in self.peak_line.peaks:
            go_to = menu.addAction(f"Go to maximum: {peak.text}")
            go_to.triggered.connect(lambda _=False, x=peak.x: self.peak_chosen.emit(x))
        ancestor = self.parentWidget()
        while ancestor is not None and ancestor.contextMenuPolicy() is not Qt.ContextMenuPolicy.ActionsContextMenu:
            ancestor = ancestor.parentWidget()
        if ancestor is not None:
            menu.addSeparator()
            menu.addActions(ancestor.actions())
        menu.popup(event.globalPos())

    def leaveEvent(self, event: object) -> None:
        self.hovered.emit(None)

    def _on_mouse_moved(self, position: QPointF) -> None:
        view = self.plot.view_box
        is_inside = view.sceneBoundingRect().contains(position)
        x = float(view.mapSceneToView(position).x()) if is_inside else None
        stop_text = "" if x is None else self.stop_bands.text_at(x)
        self.plot.setToolTip(plain_tip(f"Engine {stop_text}") if stop_text else "")
        self.hovered.emit(x)

    def _on_clicked(self, click: pg.GraphicsScene.mouseEvents.MouseClickEvent) -> None:
        view = self.plot.view_box
        if click.button() is not Qt.MouseButton.LeftButton or not view.sceneBoundingRect().contains(click.scenePos()):
            return
        position = view.mapSceneToView(click.scenePos())
        event = next(
            (
                spot.data().timed_event
                for spot in self.mark_points.pointsAt(position)
                if spot.data().timed_event is not None
            ),
            None,
        )
        if event is not None:
            self.mark_chosen.emit(event)
        else:
            self.chosen.emit(float(position.x()))

    def _on_dragged(self, _axes: object) -> None:
        (first, last), _ = self.plot.view_box.viewRange()
        self.range_dragged.emit(float(first), float(last))

    def _on_key(self, key: Qt.Key, shift: bool) -> None:
        (first, last), _ = self.plot.view_box.viewRange()
        length = last - first
        if key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            delta = max(length * _KEY_CURSOR_SHARE, self._point_s) if shift else length * _KEY_PAN_SHARE
            delta = delta if key == Qt.Key.Key_Right else -delta
            if shift:
                cursor_s = self.cursor_line.value() if self.cursor_line.isVisible() else last
                self.hovered.emit(min(max(float(cursor_s) + delta, first), last))
                announce(self.plot, self._sentence())
            else:
                self.range_dragged.emit(first + delta, last + delta)
        elif self.cursor_line.isVisible():
            self.chosen.emit(float(self.cursor_line.value()))


def _mark_tip(x: float, y: float, data: PlotMark) -> str:
    return plain_tip(data.text)


class CurveItem(pg.PlotCurveItem):  # type: ignore[misc]
    """Curve whose line has the same width on any screen and at any picture scale, and which can be drawn to SVG.

    A cosmetic pen of one pixel would be too thin on high-resolution screens, so pyqtgraph paints with a scaled pen
    there. For SVG, the curve is drawn in picture coordinates: SVG numbers have six digits, too few for seconds since
    boot, and viewers differ in how they draw a one-pixel line under scaled coordinates.
    """

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        if painter.paintEngine().type() is not QPaintEngine.Type.SVG:
            self._draw_with_scaled_pen(painter, option, widget)
        elif self.xData is not None and len(self.xData):
            self._draw_into_svg(painter)

    def _draw_with_scaled_pen(
        self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None
    ) -> None:
        original, view = self.opts["pen"], self.getViewWidget()
        on_screen = 0.0 if view is None else (self.sceneTransform() * view.viewportTransform()).m22()
        scale = (
            painter.deviceTransform().m22() / on_screen if on_screen else 1.0
        )  # includes the screen's device pixel ratio
        scaled_pen = QPen(original)
        scaled_pen.setWidthF(max(1.0, original.widthF()) * max(1.0, scale))
        self.opts["pen"] = scaled_pen
        try:
            super().paint(painter, option, widget)
        finally:
            self.opts["pen"] = original

    def _draw_into_svg(self, painter: QPainter) -> None:
        to_picture = painter.worldTransform()
        painter.save()
        painter.setWorldTransform(QTransform())
        if self.opts["fillLevel"] is not None and self.opts["brush"] is not None:
            painter.fillPath(to_picture.map(self._getFillPath()), self.opts["brush"])
        painter.setPen(self.opts["pen"])
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawPath(to_picture.map(self.getPath()))
        painter.restore()


def pause_background(theme: Theme) -> str:
    """Return the background colour (`#rrggbb`) for times in which the engine was paused or suspended."""
    return mix(theme.base, theme.warn, 0.17)


class StopBands(GapBands):
    """Bands over times in which the engine was paused or suspended.

    A band shows its text if it is wide enough. When two runs are compared, bands of run A take the upper half and bands
    of run B the lower.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bands: tuple[StopBand, ...] = ()
        self._text_color = QColor()

    def show_bands(self, bands: Sequence[StopBand]) -> None:
        if self.bands != (new_bands := tuple(bands)):
            self.bands = new_bands
            self.update()

    def apply_theme(self, theme: Theme) -> None:
        self._text_color = QColor(theme.warn)
        self.set_color(pause_background(theme))

    def text_at(self, x: float) -> str:
        """Return the text of the bands at time `x`, or "" if there are none."""
        return "; ".join(band.texts[0] for band in self.bands if band.first_s <= x <= band.last_s)

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        to_picture = painter.worldTransform()
        painter.save()
        painter.setWorldTransform(QTransform())
        painter.setFont(sans(0.82))
        painter.setPen(QPen(self._text_color))
        for band in self.bands:
            rect = self.rect_of(to_picture, band.first_s, band.last_s)
            if band.run:
                rect.setHeight(rect.height() / 2)
            if band.run == "B":
                rect.translate(0.0, rect.height())
            painter.fillRect(rect, self.color)
            for text in band.texts:
                if painter.fontMetrics().horizontalAdvance(text) + 2 * _TEXT_PADDING <= rect.width():
                    painter.drawText(rect.adjusted(_TEXT_PADDING, 1, 0, 0), Qt.AlignmentFlag.AlignTop, text)
                    break
        painter.restore()
