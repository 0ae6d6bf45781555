"""Converts between the arrangement of a window's docks and a portable layout value. Reads and writes no files.

Qt's packed state is in pixels and fits only the same window at its next start. The layout value fits other windows and
screens too. The structure is derived from the rectangles of the docks, which straight cuts can always separate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QRect, Qt
from PySide6.QtWidgets import QTabBar

from kvscope_app.settings.layout_value import KnownNames, LayoutPart, WindowLayout
from kvscope_app.views.docks import DOCKS
from kvscope_app.views.page_map.color_modes import MODE_NAMES
from kvscope_app.window.dock_state import AREAS
from kvscope_app.window.view_choices import apply_choices, choices_of
from kvscope_app.window.window_body import WindowBody

KNOWN_NAMES: Final = KnownNames(tuple(spec.name for spec in DOCKS), MODE_NAMES)
_AREAS: Final = {
    "left": Qt.DockWidgetArea.LeftDockWidgetArea,
    "right": Qt.DockWidgetArea.RightDockWidgetArea,
    "bottom": Qt.DockWidgetArea.BottomDockWidgetArea,
    "top": Qt.DockWidgetArea.TopDockWidgetArea,
}
_HORIZONTAL, _VERTICAL = Qt.Orientation.Horizontal, Qt.Orientation.Vertical
_SHARE_DECIMALS: Final = 4


@dataclass(frozen=True, slots=True)
class _Stack:
    tabs: tuple[str, ...]
    front: str
    rect: QRect


def layout_of(window: WindowBody) -> WindowLayout:
    stacks = _tab_stacks(window)
    areas = {}
    for name, area in _AREAS.items():
        area_stacks = [stack for stack in stacks if window.dockWidgetArea(window.docks[stack.tabs[0]]) == area]
        if area_stacks:
            area_rect = _bounding_rect(area_stacks)
            is_side = name in ("left", "right")
            share = area_rect.width() / window.width() if is_side else area_rect.height() / window.height()
            areas[name] = _layout_part(area_stacks, share)
    return WindowLayout(**areas, floating=_floating(window), choices=choices_of(window.views))


def show_layout(window: WindowBody, layout: WindowLayout) -> None:
    """Arrange the docks as in `layout`, scaled to the window's size, and apply the view settings stored in it.

    Raises BadInput for unknown names, before changing anything.
    """
    layout.check(KNOWN_NAMES)
    docks, size = window.docks, window.size()
    for dock in docks.values():
        dock.setFloating(False)
        window.removeDockWidget(dock)
    for name, part in layout.areas.items():
        window.addDockWidget(_AREAS[name], docks[part.first])
        _split(window, part)
    for part in layout.areas.values():
        for leaf in part.leaves():
            for name in leaf.tabs[1:]:
                window.tabifyDockWidget(docks[leaf.tabs[0]], docks[name])
    _place_floating_and_closed(window, layout)
    for name in layout.view_names():
        docks[name].show()
    for part in layout.areas.values():
        for leaf in part.leaves():
            docks[leaf.front or leaf.tabs[0]].raise_()
    if window.isVisible() and not window.isMaximized() and not window.isFullScreen():
        window.resize(size)  # docks that moved side by side may have enlarged it
    for name, part in layout.areas.items():
        is_side = name in ("left", "right")
        length = part.share * (window.width() if is_side else window.height())
        window.resizeDocks([docks[part.first]], [max(round(length), 1)], _HORIZONTAL if is_side else _VERTICAL)
    for name, part in layout.areas.items():
        across = part.share * window.width() if name in ("left", "right") else _bottom_width(layout, window.width())
        down = part.share * window.height() if name in ("top", "bottom") else float(window.height())
        _resize_parts(window, part, across, down)
    apply_choices(window.views, layout.choices)


def _bottom_width(layout: WindowLayout, width: int) -> float:
    """Return the width of the docks below the page map. It is the window's width without the left docks, which
    reach down to the window's bottom.
    """
    left = layout.areas.get("left")
    return width * max(1 - (left.share if left else 0.0), 0.1)


def _split(window: WindowBody, part: LayoutPart) -> None:
    """Split the dock area among the parts of `part`, recursively. Only the first dock of each part is placed
    here. Docks that share a place with it as tabs are added later, because Qt cannot split the area at a tab.
    """
    orientation = _HORIZONTAL if part.across else _VERTICAL
    for before, after in zip(part.parts, part.parts[1:], strict=False):
        window.splitDockWidget(window.docks[before.first], window.docks[after.first], orientation)
    for each in part.parts:
        _split(window, each)


def _resize_parts(window: WindowBody, part: LayoutPart, across: float, down: float) -> None:
    total_share = sum(each.share for each in part.parts)
    if not part.parts:
        return
    length = across if part.across else down
    sizes = [max(length * each.share / total_share, 1.0) for each in part.parts]
    firsts = [window.docks[each.first] for each in part.parts]
    window.resizeDocks(firsts, [round(size) for size in sizes], _HORIZONTAL if part.across else _VERTICAL)
    for each, size in zip(part.parts, sizes, strict=True):
        _resize_parts(window, each, size if part.across else across, size if part.down else down)


def _place_floating_and_closed(window: WindowBody, layout: WindowLayout) -> None:
    """Restore floating docks, and assign closed docks to their default area, in which they reopen as a tab."""
    screen, names = window.screen().availableGeometry(), layout.view_names()
    for spec in DOCKS:
        dock, floating_rect = window.docks[spec.name], layout.floating.get(spec.name)
        if spec.name in names and floating_rect is None:
            continue
        others = [other for other in window.docks.values() if other is not dock and not other.isFloating()]
        neighbor = next((other for other in others if window.dockWidgetArea(other) == AREAS[spec.area]), None)
        window.addDockWidget(AREAS[spec.area], dock)
        if neighbor is not None:
            window.tabifyDockWidget(neighbor, dock)
        dock.hide()
        if floating_rect is not None:
            left, top, width, height = floating_rect
            dock.setFloating(True)
            dock.setGeometry(
                screen.left() + round(left * screen.width()),
                screen.top() + round(top * screen.height()),
                max(round(width * screen.width()), 1),
                max(round(height * screen.height()), 1),
            )


def _tab_stacks(window: WindowBody) -> list[_Stack]:
    docked = [name for name, dock in window.docks.items() if not dock.isHidden() and not dock.isFloating()]
    stacks: list[_Stack] = []
    handled: set[str] = set()
    for name in docked:
        if name in handled:
            continue
        tab_neighbors = window.tabifiedDockWidgets(window.docks[name])
        tabs = tuple(each for each in docked if each == name or window.docks[each] in tab_neighbors)
        handled.update(tabs)
        stacks.append(_tab_stack(window, tabs))
    return stacks


def _tab_stack(window: WindowBody, tabs: tuple[str, ...]) -> _Stack:
    """Return the stack of the docks named `tabs`, which Qt reports as one tab group. Only the group's tab bar has the
    order of the tabs.

    For a while after docks were moved, the window also has the tab bar of a former group, perhaps with the same titles
    and another current tab. Therefore the dock in front is not read from a tab bar. It is the dock inside the window,
    because Qt moves the docks of all other tabs out of the window.
    """
    front = next((name for name in tabs if window.docks[name].geometry().intersects(window.rect())), tabs[0])
    rect = window.docks[front].geometry()
    names = {window.docks[name].windowTitle(): name for name in tabs}
    for bar in window.findChildren(QTabBar, options=Qt.FindChildOption.FindDirectChildrenOnly):
        titles = [bar.tabText(index) for index in range(bar.count())]
        is_their_tab_bar = len(tabs) > 1 and not bar.isHidden() and set(titles) == set(names)
        if is_their_tab_bar and names[bar.tabText(bar.currentIndex())] == front:
            return _Stack(tuple(names[title] for title in titles), front, rect.united(bar.geometry()))
    return _Stack(tabs, front, rect)


def _floating(window: WindowBody) -> dict[str, tuple[float, float, float, float]]:
    screen, floating = window.screen().availableGeometry(), {}
    for name, dock in window.docks.items():
        if dock.isFloating() and not dock.isHidden():
            rect = dock.geometry()
            shares = (
                min(max((rect.left() - screen.left()) / screen.width(), -1.0), 2.0),
                min(max((rect.top() - screen.top()) / screen.height(), -1.0), 2.0),
                min(max(rect.width() / screen.width(), 0.01), 1.0),
                min(max(rect.height() / screen.height(), 0.01), 1.0),
            )
            left, top, width, height = (round(share, _SHARE_DECIMALS) for share in shares)
            floating[name] = (left, top, width, height)
    return floating


def _layout_part(stacks: Sequence[_Stack], share: float) -> LayoutPart:
    share = round(min(max(share, 0.01), 1.0), _SHARE_DECIMALS)
    if len(stacks) > 1:
        for orientation in (_VERTICAL, _HORIZONTAL):
            groups = _split_by_cuts(stacks, orientation)
            if len(groups) > 1:
                lengths = [_length(_bounding_rect(group), orientation) for group in groups]
                parts = tuple(
                    _layout_part(group, length / sum(lengths)) for group, length in zip(groups, lengths, strict=True)
                )
                across, down = (parts, ()) if orientation is _HORIZONTAL else ((), parts)
                return LayoutPart(share=share, across=across, down=down)
    tabs = tuple(name for stack in stacks for name in stack.tabs)
    front = stacks[0].front
    return LayoutPart(share=share, tabs=tabs, front="" if front == tabs[0] else front)


def _split_by_cuts(stacks: Sequence[_Stack], orientation: Qt.Orientation) -> list[list[_Stack]]:
    """Return groups of stacks that straight cuts separate, in order of position."""
    start_of: Callable[[QRect], int] = QRect.left if orientation is _HORIZONTAL else QRect.top
    groups: list[list[_Stack]] = []
    end = -1
    for stack in sorted(stacks, key=lambda each: start_of(each.rect)):
        if not groups or start_of(stack.rect) >= end:
            groups.append([])
        groups[-1].append(stack)
        end = max(end, start_of(stack.rect) + _length(stack.rect, orientation))
    return groups


def _length(rect: QRect, orientation: Qt.Orientation) -> int:
    return rect.width() if orientation is _HORIZONTAL else rect.height()


def _bounding_rect(stacks: Sequence[_Stack]) -> QRect:
    rect = stacks[0].rect
    for stack in stacks[1:]:
        rect = rect.united(stack.rect)
    return rect
