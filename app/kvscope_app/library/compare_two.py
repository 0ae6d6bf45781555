"""Two recordings of the list, opened beside the window for what compares them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvscope_app.window.file_opening import FileOpening
from kvscope_app.window.window_body import WindowBody


def compare_two(window: WindowBody, first: Path, second: Path) -> None:
    """Open both, one after the other, and hand them to what compares; say why not where one cannot be opened."""

    def open_next(path: Path, then: Callable[[object], object]) -> None:
        opening = FileOpening(str(path), window)
        opening.opened.connect(then)
        opening.failed.connect(lambda reason: window.banner.tell("These cannot be compared", reason, passes=True))
        window.closing.connect(opening.cancel)
        for ended in (opening.opened, opening.failed, opening.cancelled):
            ended.connect(opening.deleteLater)

    compare = getattr(window, "compare", None)
    if compare is not None:
        open_next(first, lambda a: open_next(second, lambda b: compare(a, b)))
