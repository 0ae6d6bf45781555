"""Which views there are beside the page map: a line each. Docks, menus, keys, layouts and the names of pictures follow.

Imports no Qt and no view: the command line asks for names, and a window imports a view when it is up.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from kvscope_app.views.base import View

Area = Literal["left", "right", "bottom"]


@dataclass(frozen=True, slots=True)
class DockSpec:
    """A docked view."""

    name: str
    """The view's `object_name`: in layouts and settings, it never changes. Of pictures it has `-` for `_`."""
    title: str
    folder: str
    """In `views/`; its view is in the module that has the folder's name and `_view`."""
    cls: str
    area: Area
    size: int
    """Default width at the sides, height at the bottom, in a large window."""
    icon: str
    behind: str = ""
    """The dock that it shares a place with by default, as a tab behind it; empty: a place of its own."""
    is_open: bool = True
    """Whether it is seen at the first start."""
    pictures: Literal["", "still", "video"] = ""
    """What can be made of it: a recording alone fills it."""
    is_on_time: bool = False
    """It shows a range of time in which a cursor moves."""

    @property
    def picture_name(self) -> str:
        """As a person types it."""
        return self.name.replace("_", "-")

    def view_class(self) -> type[View]:
        """The class, imported now."""
        found: type[View] = getattr(import_module(f"kvscope_app.views.{self.folder}.{self.folder}_view"), self.cls)
        return found


_REQUESTS, _CHARTS, _TIMELINE = "requests", "throughput", "timeline"
DOCKS: Final = (
    DockSpec("console", "Console", "console", "ConsoleView", "left", 400, "chat"),
    DockSpec(_REQUESTS, "Requests", "requests", "RequestsView", "bottom", 260, "requests", pictures="video"),
    DockSpec(_CHARTS, "Throughput", "throughput", "ThroughputView", "right", 400, "chart", pictures="video"),
    DockSpec("memory", "Memory", "memory", "MemoryView", "right", 400, "memory", _CHARTS, pictures="video"),
    DockSpec("what_if", "What if", "what_if", "WhatIfView", "bottom", 260, "compare", _REQUESTS, pictures="still"),
    DockSpec(
        *(_TIMELINE, "Timeline", "timeline", "TimelineView", "bottom", 272, "timeline"),
        pictures="video",
        is_on_time=True,
    ),
    DockSpec(
        *("heatmap", "Fragmentation", "heatmap", "HeatmapView", "bottom", 272, "heatmap", _TIMELINE),
        pictures="video",
        is_on_time=True,
    ),
    DockSpec("events", "Events", "events", "EventsView", "bottom", 260, "log", _REQUESTS, pictures="still"),
    DockSpec("inspector", "Inspector", "inspector", "InspectorView", "right", 400, "inspect", _CHARTS, False),
    DockSpec("bookmarks", "Bookmarks", "bookmarks", "BookmarksView", "left", 400, "bookmark", is_open=False),
    DockSpec("devices", "Devices", "device", "DeviceView", "right", 400, "gauge", _CHARTS, False, "still"),
    DockSpec("prefixes", "Prefixes", "prefixes", "PrefixesView", "bottom", 260, "tree", _REQUESTS, pictures="still"),
    DockSpec("roofline", "Roofline", "roofline", "RooflineView", "right", 400, "chart", _CHARTS, False, "still"),
)
"""In the order of menus and keys."""
VIEWS_ON_TIME: Final = tuple(spec.name for spec in DOCKS if spec.is_on_time)
