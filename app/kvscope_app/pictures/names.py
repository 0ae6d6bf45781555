"""Which views there are pictures of, and in which formats. Imports no Qt: the command line asks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvscope_app.views.docks import DOCKS
from kvscope_telemetry.errors import BadInput

VIEWS: Final = ("page-map", *(spec.picture_name for spec in DOCKS if spec.pictures))
"""As a person types them. A recording alone fills these; the others are drawn from the window."""
VIDEO_VIEWS: Final = ("page-map", *(spec.picture_name for spec in DOCKS if spec.pictures == "video"))
STILLS: Final = (".png", ".svg")
VIDEOS: Final = (".mp4", ".webp", ".gif", ".apng")
MAX_SCALE: Final = 3
SMALLEST, LARGEST = 160, 4096
"""Of a side of a picture, in pixels before scaling."""


def suffix_of(path: Path, form: str | None) -> str:
    """The format of `path`: as its name ends, which must fit `form` (`png`, `svg`, `video`) where one is named.

    Raises BadInput where it does not.
    """
    suffix = path.suffix.lower()
    accepted = {"video": VIDEOS, None: (*STILLS, *VIDEOS)}.get(form, (f".{form}",))
    if suffix in accepted:
        return suffix
    if form in ("png", "svg"):  # a still is written under any name
        return f".{form}"
    raise BadInput(f"{str(path)!r} is not accepted: the name of a video ends in one of {', '.join(VIDEOS)}")


def is_picture(path: Path, form: str | None) -> bool:
    """Whether `path` or `form` asks for a picture or a video."""
    return form in ("png", "svg", "video") or (form is None and path.suffix.lower() in (*STILLS, *VIDEOS))
