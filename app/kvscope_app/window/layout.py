"""Where views are docked at first, and how a layout is saved and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from PySide6.QtCore import QByteArray, QPoint, QRect, QSettings, QSize, Qt
from PySide6.QtWidgets import QMainWindow

from kvscope_app.setting_names import (
    LAYOUT_VERSION,
    geometry_name,
    layout_name,
)
from kvscope_app.views.docks import DOCKS, DockSpec
from kvscope_app.window.dock import Dock

_CASCADE: Final = QPoint(32, 32)
_TOO_NEAR: Final = 24
_DEFAULT_SIZE: Final = QSize(1560, 960)
_LEAST_SHARE: Final = 0.75
"""Of its size, a dock has at least at first."""
_LEFT, _RIGHT, _BOTTOM = (
    Qt.DockWidgetArea.LeftDockWidgetArea,
    Qt.DockWidgetArea.RightDockWidgetArea,
    Qt.DockWidgetArea.BottomDockWidgetArea,
)
AREAS: Final = {"left": _LEFT, "right": _RIGHT, "bottom": _BOTTOM}


def prepare(window: QMainWindow) -> None:
    """Dock options and corners."""
    window.setDockOptions(QMainWindow.DockOption.AllowNestedDocks | QMainWindow.DockOption.AllowTabbedDocks)
    window.setCorner(Qt.Corner.BottomLeftCorner, _LEFT)
    window.setCorner(Qt.Corner.BottomRightCorner, _RIGHT)


def arrange(window: QMainWindow, docks: Mapping[str, Dock]) -> None:
    """The default layout, in a window of this size."""
    size = window.size()
    for spec in DOCKS:  # hidden while they move: side by side they need more room than there is, and the window grew
        docks[spec.name].hide()
    for spec in DOCKS:
        docks[spec.name].setFloating(False)
        window.addDockWidget(AREAS[spec.area], docks[spec.name])
    is_small = _is_small(window)
    if is_small:
        for name in ("memory", "requests"):
            window.tabifyDockWidget(docks["throughput"], docks[name])
    for spec in DOCKS:
        if spec.behind:
            window.tabifyDockWidget(docks["throughput" if is_small else spec.behind], docks[spec.name])
    for spec in DOCKS:
        docks[spec.name].setVisible(spec.is_open)
    for name in ("throughput", "requests") if not is_small else ("throughput",):
        docks[name].raise_()
    if window.isVisible() and not window.isMaximized() and not window.isFullScreen():
        window.resize(size)
    share_out(window, docks)


def share_out(window: QMainWindow, docks: Mapping[str, Dock]) -> None:
    """The sizes of the first start."""
    for spec in DOCKS:
        direction = Qt.Orientation.Vertical if spec.area == "bottom" else Qt.Orientation.Horizontal
        window.resizeDocks([docks[spec.name]], [_share(spec, window)], direction)
    sides = [docks["throughput"], docks["memory"]]
    window.resizeDocks(sides, [window.height() * 6 // 10, window.height() * 4 // 10], Qt.Orientation.Vertical)


def _share(spec: DockSpec, window: QMainWindow) -> int:
    """Its size in a window of this size: the middle gives way no faster than what is around it."""
    is_below = spec.area == "bottom"
    share = window.height() / _DEFAULT_SIZE.height() if is_below else window.width() / _DEFAULT_SIZE.width()
    return round(spec.size * min(max(share, _LEAST_SHARE), 1.0))


def _is_small(window: QMainWindow) -> bool:
    return window.width() < 1200 or window.height() < 640


def save(window: QMainWindow, settings: QSettings, group: str = "window", *, with_docks: bool = True) -> None:
    """Remember the window's place, and its layout where that is as a person wants it."""
    settings.setValue(geometry_name(group), window.saveGeometry())
    if with_docks:
        settings.setValue(layout_name(group), window.saveState(LAYOUT_VERSION))


def restore(window: QMainWindow, settings: QSettings, group: str = "window") -> bool:
    """Put the window as it was; False when nothing fitting is remembered."""
    geometry = settings.value(geometry_name(group))
    if isinstance(geometry, QByteArray):
        window.restoreGeometry(geometry)
    return restore_docks(window, settings, group)


def restore_docks(window: QMainWindow, settings: QSettings, group: str = "window") -> bool:
    """Put the docks as they were; False when nothing fitting is remembered."""
    state = settings.value(layout_name(group))
    if not isinstance(state, QByteArray):
        return False
    return window.restoreState(state, LAYOUT_VERSION)


def has_place(settings: QSettings, group: str) -> bool:
    """Whether it is remembered where this window stood."""
    return isinstance(settings.value(geometry_name(group)), QByteArray)


def place_beside(window: QMainWindow, others: Sequence[QMainWindow], has_own_place: bool) -> None:
    """No window covers another exactly: one that would, or that was never anywhere, goes a little below the newest."""
    if not others:
        return
    if not has_own_place:
        window.resize(others[-1].size())
        window.move(others[-1].pos() + _CASCADE)
    room = window.screen().availableGeometry()
    while any((window.pos() - other.pos()).manhattanLength() < _TOO_NEAR for other in others):
        moved = window.pos() + _CASCADE
        if not room.contains(QRect(moved, window.size() / 2)):
            return
        window.move(moved)


def default_size(window: QMainWindow) -> None:
    """A comfortable size that fits the screen."""
    available = window.screen().availableGeometry().size() * 0.94
    window.resize(_DEFAULT_SIZE.boundedTo(available))
