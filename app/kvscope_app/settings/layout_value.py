"""Layout of a window as a value, and as a JSON file that users can read and edit. Imports no Qt.

Sizes are fractions, so that a layout fits any screen. Layouts that the user named are stored in the settings as the
same type of value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.whole_file import write_whole

VERSION: Final = 1
"""Version of the file format. Files of other versions are rejected."""
_MAX_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 20

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
ScreenFraction = Annotated[float, msgspec.Meta(ge=-1, le=2)]
"""Position of a floating window as a fraction of the screen's width or height."""
AREAS: Final = ("left", "right", "bottom", "top")


class LayoutPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Part of a layout: exactly one of a tab group (`tabs`), parts side by side (`across`), or parts stacked
    (`down`).
    """

    share: Share = 1.0
    """Fraction of the containing part's length.

    For an outermost part (`WindowLayout.left` and so on), the fraction of the window's width (left, right) or height
    (bottom, top).
    """
    tabs: tuple[str, ...] = ()
    front: str = ""
    """Name of the current tab; empty for the first tab."""
    across: tuple[LayoutPart, ...] = ()
    down: tuple[LayoutPart, ...] = ()

    @property
    def parts(self) -> tuple[LayoutPart, ...]:
        return self.across or self.down

    @property
    def first(self) -> str:
        return self.tabs[0] if self.tabs else self.parts[0].first

    def leaves(self) -> Iterator[LayoutPart]:
        if self.tabs:
            yield self
        for part in self.parts:
            yield from part.leaves()


class KnownNames(NamedTuple):
    views: tuple[str, ...]
    color_modes: tuple[str, ...]


class Choices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Choices made in the views. A choice of None leaves the view as it is."""

    color_mode: str | None = None
    flashes: bool | None = None
    request_filter: str | None = None
    request_columns: dict[str, Annotated[int, msgspec.Meta(ge=1, le=4000)]] | None = None
    event_kinds: tuple[str, ...] | None = None
    views: dict[str, str] = {}
    """Data that views save between runs, by their settings keys (`setting_names`)."""


class WindowLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Open views and their arrangement. Views that are not named are closed."""

    left: LayoutPart | None = None
    right: LayoutPart | None = None
    bottom: LayoutPart | None = None
    top: LayoutPart | None = None
    floating: dict[str, tuple[ScreenFraction, ScreenFraction, Share, Share]] = {}
    """Floating views by name: left, top, width and height as fractions of the screen."""
    choices: Choices = Choices()

    @property
    def areas(self) -> dict[str, LayoutPart]:
        return {name: part for name in AREAS if (part := getattr(self, name)) is not None}

    def view_names(self) -> list[str]:
        docked = [name for part in self.areas.values() for leaf in part.leaves() for name in leaf.tabs]
        return [*docked, *self.floating]

    def check(self, known_names: KnownNames) -> None:
        """Raise BadInput for names that are not in `known_names`, a view that occurs twice, or an invalid part."""
        for part in self.areas.values():
            _check_part(part)
        names = self.view_names()
        for name in names:
            if name not in known_names.views:
                raise BadInput(f"there is no view {name!r}; there are {', '.join(known_names.views)}")
            if names.count(name) > 1:
                raise BadInput(f"the view {name!r} appears twice")
        mode = self.choices.color_mode
        if mode is not None and mode not in known_names.color_modes:
            raise BadInput(
                f"color_mode={mode!r:.40} is not accepted: must be one of {', '.join(known_names.color_modes)}"
            )


def read_layout(path: str | Path, known_names: KnownNames) -> WindowLayout:
    """Read and check a layout file. Raises BadInput with a one-line message."""
    try:
        if os.path.getsize(path) > _MAX_BYTES:
            raise BadInput(f"{path} is not a layout: it is larger than 1 MiB")
        raws = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(raws.pop("kvscope_layout"), type=int)
    except OSError as error:
        raise BadInput(f"layout {path} cannot be read: {error.strerror or error}") from error
    except (KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise BadInput(f"{path} is not a layout of kvscope") from error
    if version != VERSION:
        raise BadInput(f"{path} is a layout of version {version}; this kvscope reads version {VERSION}")
    try:
        layout = msgspec.json.decode(msgspec.json.encode(raws), type=WindowLayout)
        layout.check(known_names)
    except (RecursionError, msgspec.MsgspecError, BadInput) as error:
        raise BadInput(f"layout {path} cannot be used: {error}") from error
    return layout


def write_layout(path: str | Path, layout: WindowLayout) -> None:
    """Write `layout` to a file, replacing it. Raises BadInput if the file cannot be written."""
    document = {"kvscope_layout": VERSION, **msgspec.to_builtins(layout)}
    try:
        write_whole(Path(path), msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    except OSError as error:
        raise BadInput(f"layout {path} cannot be written: {error.strerror or error}") from error


def _check_part(part: LayoutPart, depth: int = 0) -> None:
    if sum(map(bool, (part.tabs, part.across, part.down))) != 1:
        raise BadInput("each part needs exactly one of tabs, across and down")
    if part.front and part.front not in part.tabs:
        raise BadInput(f"front is {part.front!r}, which is not one of the tabs")
    if depth > _MAX_DEPTH:
        raise BadInput(f"parts are nested more than {_MAX_DEPTH} levels deep")
    for each in part.parts:
        _check_part(each, depth + 1)
