"""Names of the views and formats of pictures and videos. Imports no Qt, because the command line uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvscope_app.views.docks import DOCKS
from kvscope_telemetry.errors import BadInput

VIEWS: Final = ("page-map", *(spec.picture_name for spec in DOCKS if spec.pictures))
"""Command-line names of the views that can be exported from a recording. All other views need a window."""
VIDEO_VIEWS: Final = ("page-map", *(spec.picture_name for spec in DOCKS if spec.pictures == "video"))
STILL_SUFFIXES: Final = (".png", ".svg")
VIDEO_SUFFIXES: Final = (".mp4", ".webp", ".gif", ".apng")
MAX_SCALE: Final = 3
MIN_SIDE_PX, MAX_SIDE_PX = 160, 4096
"""Limits of the width and height of a picture, in pixels before scaling."""


def suffix_of(path: Path, format_name: str | None) -> str:
    """Return the format of `path` as a suffix such as ".png".

    Args:
        path: Output file, whose suffix names the format.
        format_name: "png", "svg" or "video", or None to accept any format. For "png" and "svg", `path` may have any
            suffix.

    Raises:
        BadInput: The suffix is unknown, or `format_name` is "video" and the suffix is not that of a video.
    """
    suffix = path.suffix.lower()
    accepted = {"video": VIDEO_SUFFIXES, None: (*STILL_SUFFIXES, *VIDEO_SUFFIXES)}.get(
        format_name, (f".{format_name}",)
    )
    if suffix in accepted:
        return suffix
    if format_name in ("png", "svg"):  # a still is written under any name
        return f".{format_name}"
    raise BadInput(f"{str(path)!r} is not accepted: the name of a video ends in one of {', '.join(VIDEO_SUFFIXES)}")


def is_picture(path: Path, format_name: str | None) -> bool:
    return format_name in ("png", "svg", "video") or (
        format_name is None and path.suffix.lower() in (*STILL_SUFFIXES, *VIDEO_SUFFIXES)
    )
