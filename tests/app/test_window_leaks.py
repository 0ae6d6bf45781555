"""Tests that closed windows leave no widget, session, timer, thread, socket or file descriptor."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QObject, QSettings
from PySide6.QtGui import QPixmap, QPixmapCache, QScreen
from PySide6.QtWidgets import QApplication, QCommonStyle, QWidget
from tests.app.window_driver import load_only_views
from tests.processes import num_open_files
from tests.simulated_engine.command import COMMAND
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_app.command_line import Options
from kvscope_app.desktop import Desktop
from kvscope_app.engine_launcher.engine_process import EngineProcess
from kvscope_app.views.docks import DOCKS
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

WAIT_S = 60.0
SHARED = (QScreen, QCommonStyle)
"""Classes of objects that belong to the application. PySide ties the Python wrapper of such an object to the widget
whose `screen()` or `style()` was called last, so it appears and disappears with windows without leaking them."""
SIMULATED = [*COMMAND, "--endpoint", "{endpoint}", "--blocks", "300"]


@pytest.fixture
def desktop(qapp, tmp_path):
    made = Desktop(qapp, Options(theme="dark"), QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat))
    yield made
    made.close()
    made.deleteLater()


@pytest.fixture
def endpoint():
    """Address of an engine in another process, whose open files are not counted here."""
    process = EngineProcess(command=SIMULATED)
    process.start()
    yield process.endpoint
    process.close()


@pytest.fixture
def recording(tmp_path):
    """Path of a short recording."""
    engine = SimulatedEngine(num_blocks=120, num_running=6, epoch=9)
    with RecordingWriter(tmp_path / "day.mcap") as writer:
        for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(20))):
            writer.write(message, wait=True)
    return str(tmp_path / "day.mcap")


def object_counts():
    """Return the counts of Qt objects, threads and descriptors, after deferred deletions."""
    for _ in range(3):
        QCoreApplication.processEvents()
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    gc.unfreeze()  # count objects that were frozen while a window was open, too
    gc.collect()
    things = [type(thing) for thing in gc.get_objects() if issubclass(type(thing), QObject)]
    kinds = Counter(kind.__name__ for kind in things if kind not in SHARED)
    gc.freeze()
    return {
        "widgets": len(QApplication.allWidgets()),
        "windows": len(QApplication.topLevelWidgets()),
        "threads": threading.active_count(),
        "descriptors": num_open_files() - num_pooled_threads(),
        **{f"objects of {name}": number for name, number in kinds.items()},
    }


def growth_since(before):
    """Return the counts that grew since `before`, as (before, now)."""
    return {key: (before.get(key, 0), number) for key, number in object_counts().items() if number > before.get(key, 0)}


def num_pooled_threads():
    """Return the number of threads in Qt's pool. They come and go with painting; each has one descriptor."""
    names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
    return sum(name.read_text().strip() == "Thread (pooled)" for name in names)


def open_and_close(desktop, open_one, qtbot):
    """Open a window with all its views and close it. Returns weak references to objects that must be deleted."""
    open_one()
    window = desktop.windows[-1]
    with qtbot.waitSignal(window.views_loaded, timeout=120_000):
        pass
    qtbot.waitUntil(lambda: window.session.mirror.num_blocks > 0, timeout=120_000)
    gone = [weakref.ref(thing) for thing in (window, window.session, window.session.history, *window.views.values())]
    window.close()
    return gone


def wait_until_gone(gone, qtbot):
    qtbot.waitUntil(lambda: not [1 for reference in gone if reference() is not None], timeout=120_000)


def growth_after_windows(desktop, open_one, times, qtbot):
    """Return the counts that grew between the first window and `times` further windows."""
    gone = open_and_close(desktop, open_one, qtbot)  # the first window creates lasting objects: imports, fonts, caches
    wait_until_gone(gone, qtbot)
    qtbot.waitUntil(lambda: not desktop._cleanup_timer.isActive())
    before = object_counts()
    for _ in range(times):
        gone += open_and_close(desktop, open_one, qtbot)
    wait_until_gone(gone, qtbot)
    assert not desktop.windows
    assert not desktop.sessions
    return final_growth(before, qtbot)


def final_growth(before, qtbot):
    """Return the counts that grew since `before`, once deferred work is finished."""
    deadline = time.monotonic() + WAIT_S
    while (left := growth_since(before)) and time.monotonic() < deadline:
        qtbot.wait(50)
    return left


def test_leak_check_does_not_count_the_screen_and_style_objects_of_qt(qtbot):
    widget = QWidget()
    qtbot.addWidget(widget)
    before = object_counts()
    screen, style = widget.screen(), widget.style()
    assert (type(screen), type(style)) == SHARED
    assert not growth_since(before)


def test_closed_live_windows_leak_nothing(desktop, endpoint, amount, qtbot):
    assert not growth_after_windows(desktop, lambda: desktop.attach(endpoint), amount(1, 100), qtbot)


def test_closed_windows_on_recordings_leak_nothing(desktop, recording, amount, qtbot):
    assert not growth_after_windows(
        desktop, lambda: desktop.open_recording(Recording.open(recording)), amount(1, 100), qtbot
    )


def open_and_close_fleet(desktop, qtbot):
    desktop.open_fleet()
    window = desktop.fleets.windows[-1]
    qtbot.waitUntil(lambda: any(row.state == "live" for row in window.fleet.rows), timeout=120_000)
    window.refresh()
    gone = [weakref.ref(thing) for thing in (window, window.table, window.table.fleet, window.fleet)]
    window.close()
    return gone


def test_closed_fleet_windows_leak_nothing(desktop, endpoint, amount, qtbot):
    desktop.attach(endpoint)
    watched = desktop.windows[-1]
    load_only_views(watched)
    qtbot.waitUntil(lambda: len(watched.session.overview) >= 1, timeout=120_000)
    gone = open_and_close_fleet(desktop, qtbot)
    wait_until_gone(gone, qtbot)
    before = object_counts()
    for _ in range(amount(1, 100)):
        gone += open_and_close_fleet(desktop, qtbot)
    wait_until_gone(gone, qtbot)
    assert not final_growth(before, qtbot)
    watched.close()


@pytest.mark.parametrize("last", [DOCKS[0].name, "requests", "events"])
def test_window_closed_while_views_load_stops_loading_and_leaks_nothing(desktop, recording, qtbot, last):
    window = desktop.open_recording(Recording.open(recording))
    names = []

    def close_after_last(name):
        names.append(name)
        if name == last:
            desktop.windows[-1].close()

    window.docked.loaded.connect(close_after_last)
    gone = [weakref.ref(thing) for thing in (window, window.session, window.session.history)]
    del window  # so that closed windows can be collected
    wait_until_gone(gone, qtbot)
    assert names[-1] == last


def test_closed_window_leaves_no_style_rules_and_no_cached_pixmaps(desktop, recording, qtbot, monkeypatch):
    forgotten = []
    monkeypatch.setattr("kvscope_app.desktop.clear_style_cache", forgotten.append)
    desktop.open_recording(Recording.open(recording))
    drawing = QPixmap(64, 64)
    QPixmapCache.insert("of a window", drawing)
    desktop.windows[-1].close()
    qtbot.waitUntil(lambda: QPixmapCache.find("of a window", drawing) is False, timeout=120_000)
    assert forgotten == [QApplication.instance()]
