"""List of the docked views. Docks, menus, shortcuts, layouts and names of pictures are derived from it.

Imports no Qt and no view: the command line needs only the names, and a window imports the views after it has opened.
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
    name: str
    """Name of the view (`View.object_name`), used in layouts and settings. It must never change."""
    title: str
    folder: str
    """Folder in `views/`. The view's module is `<folder>_view` in that folder."""
    cls: str
    area: Area
    size: int
    """Default width at the sides, or default height at the bottom, in pixels, in a large window."""
    icon: str
    behind: str = ""
    """Name of the dock behind which this dock is a tab by default; empty if it has its own area."""
    is_open: bool = True
    pictures: Literal["", "still", "video"] = ""
    """Pictures that `kvscope export` can make of the view: none, only still pictures, or also videos."""
    is_on_time: bool = False

    @property
    def picture_name(self) -> str:
        return self.name.replace("_", "-")

    def view_class(self) -> type[View]:
        """Import the view's module and return its class."""
        view_class: type[View] = getattr(import_module(f"kvscope_app.views.{self.folder}.{self.folder}_view"), self.cls)
        return view_class


_REQUESTS, _CHARTS, _TIMELINE = "requests", "throughput", "timeline"
DOCKS: Final = (
    DockSpec("console", "Console", "console", "ConsoleView", "left", 400, "chat"),
    DockSpec(_REQUESTS, "Requests", "requests", "RequestsView", "bottom", 260, "requests", pictures="video"),
    DockSpec(_CHARTS, "Throughput", "throughput", "ThroughputView", "right", 400, "chart", pictures="video"),
    DockSpec("memory", "Memory", "memory", "MemoryView", "right", 400, "memory", _CHARTS, pictures="video"),
    DockSpec("what_if", "What if", "what_if", "WhatIfView", "bottom", 260, "compare", _REQUESTS, pictures="still"),
    DockSpec(
        _TIMELINE,
        "Timeline",
        "timeline",
        "TimelineView",
        "bottom",
        272,
        "timeline",
        pictures="video",
        is_on_time=True,
    ),
    DockSpec(
        "heatmap",
        "Fragmentation",
        "heatmap",
        "HeatmapView",
        "bottom",
        272,
        "heatmap",
        _TIMELINE,
        pictures="video",
        is_on_time=True,
    ),
    DockSpec("events", "Events", "events", "EventsView", "bottom", 260, "log", _REQUESTS, pictures="still"),
    DockSpec("inspector", "Inspector", "inspector", "InspectorView", "right", 400, "inspect", _CHARTS, False),
    DockSpec("bookmarks", "Bookmarks", "bookmarks", "BookmarksView", "left", 400, "bookmark", is_open=False),
    DockSpec("devices", "Devices", "device", "DeviceView", "right", 400, "gauge", _CHARTS, False, "still"),
    DockSpec("prefixes", "Prefixes", "prefixes", "PrefixesView", "bottom", 260, "tree", _REQUESTS, pictures="still"),
    DockSpec("roofline", "Roofline", "roofline", "RooflineView", "right", 400, "chart", _CHARTS, False, "still"),
    DockSpec("query", "Query", "query", "QueryView", "bottom", 260, "find", _REQUESTS, False),
)
"""All views except the page map, in the order of menus and shortcuts."""
VIEWS_ON_TIME: Final = tuple(spec.name for spec in DOCKS if spec.is_on_time)
