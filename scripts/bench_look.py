"""Times what a change of the theme and of the size of text takes in the real window, on the sample recording.

`python scripts/bench_look.py [--rounds N] [--profile CHANGE]` prints for each change the median of the rounds: wall and
processor milliseconds until the call is back, until what is seen was painted, and until all is done. Wants a display.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable

from PySide6.QtCore import QCoreApplication, QEvent, QObject
from PySide6.QtWidgets import QMenuBar, QWidget

from kvscope_app.views.page_map.canvas import Canvas
from kvscope_app.window.dock import DockTitle
from kvscope_app.window.status_bar import StatusBar

_SIZE = (1600, 900)
_QUIET_S = 0.4
"""What comes later than this after the last work belongs to something else."""
_WORK_S = 0.004
"""Less in a turn of the event loop is no work of the change."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Times changes of theme and text size in the real window.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--profile", choices=("theme", "larger", "smaller", "palette"), help="print where the time goes"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvscope-look-") as folder:
        os.environ["XDG_CONFIG_HOME"] = folder  # nobody's settings are read or written
        _run(args)


def _run(args: argparse.Namespace) -> None:
    from kvscope_app.bench.bench_command import open_desktop
    from kvscope_app.bench.event_loop import run_for, run_until
    from kvscope_telemetry.recordings.reader import Recording
    from kvscope_telemetry.recordings.sample import sample_recording

    with open_desktop() as desktop:
        window = desktop.open_recording(Recording(sample_recording()))
        window.resize(*_SIZE)
        window.show()
        run_until(window.views_loaded)
        window.session.timeline.pause()
        window.session.timeline.go_to(window.session.source.recording.start_ns + 20_000_000_000)
        run_for(3)
        themes = window.themes
        seen = [
            widget
            for widget in window.findChildren(QWidget)
            if not widget.visibleRegion().isEmpty() and type(widget) in (Canvas, DockTitle, StatusBar, QMenuBar)
        ]
        safe = ["safe", "usual"]
        changes: dict[str, Callable[[], None]] = {
            "theme": themes.toggle,
            "larger": lambda: themes.zoom(1),
            "smaller": lambda: themes.zoom(-1),
            "palette": lambda: themes.choose_palette(safe[themes.settings.values.palette == "safe"]),
        }
        took: dict[str, list[tuple[float, ...]]] = {name: [] for name in changes}
        profile = cProfile.Profile()
        for _ in range(args.rounds):
            for name, change in changes.items():
                if args.profile == name:
                    profile.enable()
                took[name].append(_timed(change, seen))
                profile.disable()
        print(f"load {os.getloadavg()[0]:.1f}")
        for name, all_of_it in took.items():
            ms = [statistics.median(column) * 1000 for column in zip(*all_of_it, strict=True)]
            parts = zip(("called", "seen painted", "all done"), ms[::2], ms[1::2], strict=True)
            print(f"{name:8}", ", ".join(f"{part} {wall:5.0f} ms ({cpu:4.0f} processor)" for part, wall, cpu in parts))
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35).sort_stats("cumtime").print_stats(70)


class _FirstPaints(QObject):
    """Notes wall and processor time when each of some widgets is painted for the first time."""

    def __init__(self, widgets: list[QWidget]) -> None:
        super().__init__()
        self.waiting = set(widgets)
        self.last = (0.0, 0.0)
        for widget in widgets:
            widget.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Paint and watched in self.waiting:
            self.waiting.discard(watched)
            self.last = (time.monotonic(), time.process_time())
        return False


def _timed(change: Callable[[], None], seen: list[QWidget]) -> tuple[float, ...]:
    """Wall and processor seconds until the call is back, until `seen` were painted, until the last work of the loop."""
    paints = _FirstPaints(seen)
    began, cpu = time.monotonic(), time.process_time()
    change()
    called = done = (time.monotonic() - began, time.process_time() - cpu)
    while (now := time.monotonic()) - began - done[0] < _QUIET_S:
        QCoreApplication.processEvents()
        if time.monotonic() - now > _WORK_S:
            done = (time.monotonic() - began, time.process_time() - cpu)
        else:
            time.sleep(0.002)
    for widget in seen:
        widget.removeEventFilter(paints)
    assert not paints.waiting, "some of what is seen was not painted"
    return *called, paints.last[0] - began, paints.last[1] - cpu, *done


if __name__ == "__main__":
    main()
