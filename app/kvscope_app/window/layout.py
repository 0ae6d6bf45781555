"""Which views there are, where they are docked at first, and how a layout is saved and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from PySide6.QtCore import QByteArray, QPoint, QRect, QSettings, QSize, Qt
from PySide6.QtWidgets import QMainWindow

from kvscope_app.setting_names import (
    LAYOUT_VERSION,
    geometry_name,
    layout_name,
)
from kvscope_app.views.base import View
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


@dataclass(frozen=True, slots=True)
class DockSpec:
    """A docked view. Its module is imported after the window is up."""

    name: str
    title: str
    module: str
    cls: str
    area: Qt.DockWidgetArea
    size: int
    """Width at the sides, height at the bottom, at first."""
    icon: str
    is_open: bool = True
    """Whether it is seen at the first start."""

    def view_class(self) -> type[View]:
        """The class, imported now."""
        found: type[View] = getattr(import_module(self.module), self.cls)
        return found


DOCKS: Final = (
    DockSpec("console", "Console", "kvscope_app.views.console", "ConsoleView", _LEFT, 400, "chat"),
    DockSpec("requests", "Requests", "kvscope_app.views.requests.view", "RequestsView", _BOTTOM, 300, "requests"),
    DockSpec("throughput", "Throughput", "kvscope_app.views.throughput.view", "ThroughputView", _RIGHT, 400, "chart"),
    DockSpec("memory", "Memory", "kvscope_app.views.memory.view", "MemoryView", _RIGHT, 400, "memory"),
    DockSpec("what_if", "What if", "kvscope_app.views.what_if", "WhatIfView", _BOTTOM, 300, "compare"),
    DockSpec("timeline", "Timeline", "kvscope_app.views.timeline.view", "TimelineView", _BOTTOM, 300, "timeline"),
    DockSpec("heatmap", "Fragmentation", "kvscope_app.views.heatmap.view", "HeatmapView", _BOTTOM, 300, "heatmap"),
    DockSpec("events", "Events", "kvscope_app.views.events.view", "EventsView", _BOTTOM, 300, "log"),
    DockSpec(
        "inspector", "Inspector", "kvscope_app.views.inspector.view", "InspectorView", _RIGHT, 400, "inspect", False
    ),
    DockSpec(
        "bookmarks", "Bookmarks", "kvscope_app.views.bookmarks.view", "BookmarksView", _LEFT, 400, "bookmark", False
    ),
    DockSpec("devices", "Devices", "kvscope_app.views.device.view", "DeviceView", _RIGHT, 400, "gauge", False),
    DockSpec("prefixes", "Prefixes", "kvscope_app.views.prefixes.view", "PrefixesView", _BOTTOM, 300, "tree", False),
    DockSpec("roofline", "Roofline", "kvscope_app.views.roofline.view", "RooflineView", _RIGHT, 400, "chart", False),
)
_BEHIND_REQUESTS: Final = ("what_if", "timeline", "heatmap", "events", "prefixes")


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
        window.addDockWidget(spec.area, docks[spec.name])
    if _is_small(window):
        for name in ("memory", "requests", *_BEHIND_REQUESTS):
            window.tabifyDockWidget(docks["throughput"], docks[name])
    else:
        for name in _BEHIND_REQUESTS:
            window.tabifyDockWidget(docks["requests"], docks[name])
    for name in ("inspector", "devices", "roofline"):
        window.tabifyDockWidget(docks["throughput"], docks[name])
    for spec in DOCKS:
        docks[spec.name].setVisible(spec.is_open)
    for name in ("throughput", "requests") if not _is_small(window) else ("throughput",):
        docks[name].raise_()
    if window.isVisible() and not window.isMaximized() and not window.isFullScreen():
        window.resize(size)
    share_out(window, docks)


def share_out(window: QMainWindow, docks: Mapping[str, Dock]) -> None:
    """The sizes of the first start."""
    for spec in DOCKS:
        direction = Qt.Orientation.Vertical if spec.area is _BOTTOM else Qt.Orientation.Horizontal
        window.resizeDocks([docks[spec.name]], [_share(spec, window)], direction)
    sides = [docks["throughput"], docks["memory"]]
    window.resizeDocks(sides, [window.height() * 6 // 10, window.height() * 4 // 10], Qt.Orientation.Vertical)


def _share(spec: DockSpec, window: QMainWindow) -> int:
    """Its size in a window of this size: the middle gives way no faster than what is around it."""
    is_below = spec.area is _BOTTOM
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
