"""Default arrangement of the docks, and saving and restoring of layouts."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from PySide6.QtCore import QByteArray, QPoint, QRect, QSettings, Qt
from PySide6.QtWidgets import QMainWindow

from kvscope_app.setting_names import (
    LAYOUT_VERSION,
    geometry_name,
    layout_name,
    lengths_name,
)
from kvscope_app.ui.window_size import DEFAULT_SIZE
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.docks import DOCKS, DockSpec
from kvscope_app.window.dock import Dock

_CASCADE_OFFSET: Final = QPoint(32, 32)
_MIN_CASCADE_DISTANCE_PX: Final = 24
_MIN_SHARE: Final = 0.75
"""Minimum size of a dock in a small window, as a share of `DockSpec.size`."""
_MIN_STACKED_HEIGHT: Final = 780
"""Minimum height of a window, in pixels, in which timeline and requests are stacked rather than tabbed."""
_LEFT, _RIGHT, _BOTTOM = (
    Qt.DockWidgetArea.LeftDockWidgetArea,
    Qt.DockWidgetArea.RightDockWidgetArea,
    Qt.DockWidgetArea.BottomDockWidgetArea,
)
AREAS: Final = {"left": _LEFT, "right": _RIGHT, "bottom": _BOTTOM}


def prepare(window: QMainWindow) -> None:
    """Set the dock options, and which dock areas extend into the window's corners."""
    window.setDockOptions(QMainWindow.DockOption.AllowNestedDocks | QMainWindow.DockOption.AllowTabbedDocks)
    window.setCorner(Qt.Corner.BottomLeftCorner, _LEFT)  # the console is as high as the window
    window.setCorner(Qt.Corner.BottomRightCorner, _BOTTOM)  # timeline and requests are wide


def arrange(window: QMainWindow, docks: Mapping[str, Dock]) -> None:
    """Arrange the docks by default for the window's size.

    Charts are to the right of the page map. Timeline and requests are below the map and the charts, the requests at the
    bottom. In a low window, timeline and requests are tabs of one dock area. In a small window all docks except the
    left ones are tabs at the right, in a narrow window all docks are.
    """
    size = window.size()
    for spec in DOCKS:  # hidden while they move, because the window would grow: side by side they need more space
        docks[spec.name].hide()
    for spec in DOCKS:
        docks[spec.name].setFloating(False)
        window.addDockWidget(AREAS[spec.area], docks[spec.name])
    is_small = _is_small(window)
    if is_small:
        left = [spec.name for spec in DOCKS if spec.area == "left"] if _is_narrow(window) else []
        for name in (*left, "requests", "timeline"):
            window.tabifyDockWidget(docks["throughput"], docks[name])
    elif window.height() < _MIN_STACKED_HEIGHT:
        window.tabifyDockWidget(docks["requests"], docks["timeline"])
    else:
        window.splitDockWidget(docks["timeline"], docks["requests"], Qt.Orientation.Vertical)
    for spec in DOCKS:
        if spec.behind:
            window.tabifyDockWidget(docks["throughput" if is_small else spec.behind], docks[spec.name])
    for spec in DOCKS:
        docks[spec.name].setVisible(spec.is_open)
    for name in ("throughput",) if is_small else ("throughput", "timeline", "requests"):
        docks[name].raise_()
    if window.isVisible() and not window.isMaximized() and not window.isFullScreen():
        window.resize(size)
    apply_default_sizes(window, docks)


def apply_default_sizes(window: QMainWindow, docks: Mapping[str, Dock]) -> None:
    for orientation, areas in ((Qt.Orientation.Horizontal, ("left", "right")), (Qt.Orientation.Vertical, ("bottom",))):
        specs = [spec for spec in DOCKS if spec.area in areas]
        window.resizeDocks(
            [docks[spec.name] for spec in specs], [default_length(spec, window) for spec in specs], orientation
        )


def default_length(spec: DockSpec, window: QMainWindow) -> int:
    """Return the dock's default width or height in pixels. In a small window, docks and page map shrink by the same
    factor.
    """
    is_below = spec.area == "bottom"
    share = window.height() / DEFAULT_SIZE.height() if is_below else window.width() / DEFAULT_SIZE.width()
    return round(spec.size * min(max(share, _MIN_SHARE), 1.0))


def _is_small(window: QMainWindow) -> bool:
    return window.width() < scaled(1200) or window.height() < scaled(640)


def _is_narrow(window: QMainWindow) -> bool:
    """Whether the window is too narrow for docks on both sides of the page map."""
    return window.width() < scaled(700)


def save(window: QMainWindow, settings: QSettings, group: str = "window", *, with_docks: bool = True) -> None:
    """Save the geometry of the window and, if `with_docks`, the layout of its docks."""
    settings.setValue(geometry_name(group), window.saveGeometry())
    if with_docks:
        settings.setValue(layout_name(group), window.saveState(LAYOUT_VERSION))


def restore(window: QMainWindow, settings: QSettings, group: str = "window") -> bool:
    """Restore the geometry and the layout. Returns False if no layout of this version is saved."""
    geometry = settings.value(geometry_name(group))
    if isinstance(geometry, QByteArray):
        window.restoreGeometry(geometry)
    return restore_docks(window, settings, group)


def restore_docks(window: QMainWindow, settings: QSettings, group: str = "window") -> bool:
    """Restore the layout of the docks. Returns False if no layout of this version is saved."""
    state = settings.value(layout_name(group))
    if not isinstance(state, QByteArray):
        return False
    if window.isVisible():
        return window.restoreState(state, LAYOUT_VERSION)
    # If a hidden window is to be maximized and the layout does not fit yet (it was saved on a larger screen), Qt keeps
    # a copy of the layout for up to 150 ms after the window is shown, to apply it again. The next restoreState frees
    # the items of that copy, and the next resize uses them: a crash at every start (Qt 6.11). Qt makes no copy for a
    # window that is not maximized.
    window_state = window.windowState()
    window.setWindowState(Qt.WindowState.WindowNoState)
    restored = window.restoreState(state, LAYOUT_VERSION)
    window.setWindowState(window_state)
    return restored


def back_up_layout(settings: QSettings, group: str) -> Path | None:
    """Remove the saved layout of `group` from the settings, after copying the settings file.

    Returns the path of the copy; None if there is no file, or if it could not be copied.
    """
    settings.sync()
    path = Path(settings.fileName())
    copies = (path.with_name(f"{path.name}.before-{number}") for number in itertools.count(1))
    copy = next(each for each in copies if not each.exists())
    with suppress(OSError):
        shutil.copy(path, copy)
    for name in (geometry_name(group), layout_name(group), lengths_name(group)):
        settings.remove(name)
    return copy if copy.exists() else None


def has_geometry(settings: QSettings, group: str) -> bool:
    return isinstance(settings.value(geometry_name(group)), QByteArray)


def cascade(window: QMainWindow, others: Sequence[QMainWindow], has_saved_geometry: bool) -> None:
    """Move the window step by step until it covers none of `others` exactly.

    Without a saved geometry, first give it the size of the last window in `others` and a position next to it.
    """
    if not others:
        return
    if not has_saved_geometry:
        window.resize(others[-1].size())
        window.move(others[-1].pos() + _CASCADE_OFFSET)
    screen_rect = window.screen().availableGeometry()
    while any((window.pos() - other.pos()).manhattanLength() < _MIN_CASCADE_DISTANCE_PX for other in others):
        position = window.pos() + _CASCADE_OFFSET
        if not screen_rect.contains(QRect(position, window.size() / 2)):
            return
        window.move(position)
