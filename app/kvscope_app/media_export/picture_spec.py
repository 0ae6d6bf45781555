"""Options of a picture or video of a recording. Imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEFAULT_SIZE: Final = (960, 600)


@dataclass(frozen=True, slots=True)
class PictureSpec:
    """Picture or video to make of a recording.

    Times are seconds from the recording's start. None means the start (`from_s`) or the end (`until_s`, `at_s`).
    """

    path: Path
    suffix: str
    view: str = "page-map"
    at_s: float | None = None
    from_s: float | None = None
    until_s: float | None = None
    speed: float = 1.0
    fps: float = 10.0
    size: tuple[int, int] | None = None
    """Width and height in pixels before scaling. None means `DEFAULT_SIZE`, and lets a still picture grow with its
    content.
    """
    scale: int = 1
    theme: str = "dark"
    captioned: bool = False

    @property
    def has_range(self) -> bool:
        return self.from_s is not None or self.until_s is not None
