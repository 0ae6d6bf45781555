"""Trigger every action of a window on a simulated engine over real sockets, and count the objects that remain.

`python -m tests.app.every_action FOLDER THEME…` opens one window per theme in its own process, so that it can use
another scale factor, and prints the result as JSON. Used by `test_every_action`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.app.window_driver import has_all_views

LEAVES = ("close", "quit")
"""Actions that end the window; only the first is triggered, after all others."""
CHILD = ["/bin/sh", "-c", """while read -r _; do echo '{"error": "nothing is worked out here"}'; done"""]
"""Replacement of the engine's commands, because importing torch takes longer than the whole test."""
WAIT_S = 120.0


def run(folder, themes):
    """Return exceptions, Qt warnings, triggered actions and leaked objects."""
    from PySide6.QtCore import QCoreApplication, QSettings, qInstallMessageHandler
    from tests.simulated_engine.engine import SimulatedEngine
    from tests.simulated_engine.server import SimulatedServer

    from kvscope_app.application import make_application
    from kvscope_app.command_line import Options
    from kvscope_app.desktop import Desktop
    from kvscope_app.planning import plan_process

    done, problems, commands = [], [], []
    plan_process.engine_command = lambda *words: commands.append(words) or CHILD
    qInstallMessageHandler(lambda _kind, _where, text: done.append(text))
    sys.excepthook = lambda *error: problems.append("".join(traceback.format_exception(*error)))  # exceptions in slots
    app = QCoreApplication.instance() or make_application()
    settings = QSettings(str(folder / "s.ini"), QSettings.Format.IniFormat)
    engine = SimulatedEngine(num_blocks=120, num_running=6)
    server = SimulatedServer(engine, f"ipc://{folder}/telemetry", rate=20.0)
    desktop = Desktop(app, Options(theme=themes[0]), settings)
    num_threads = threading.active_count()
    try:
        windows, stood = [], []
        for theme in themes:
            desktop.themes.choose(theme)
            windows.append(_one_window(app, desktop, folder, problems))
            stood.append(_object_counts(app, desktop, num_threads))
        until = time.monotonic() + WAIT_S
        while _grown_counts(*stood) and time.monotonic() < until:  # wait until deferred work is finished
            stood[-1] = _object_counts(app, desktop, num_threads)
    except Exception:
        problems.append(traceback.format_exc())
        return {"problems": problems}
    finally:
        sys.excepthook = sys.__excepthook__
        desktop.close()
        server.close()
    harmless = "This plugin does not support"
    return {
        "problems": problems,
        "warnings": [text for text in done if harmless not in text],
        "windows": windows,
        "left": _grown_counts(*stood),
        "commands": commands,
    }


def _one_window(app, desktop, folder, problems):
    desktop.attach(f"ipc://{folder}/telemetry")
    window = desktop.windows[-1]
    _wait(app, lambda: has_all_views(window) and window.session.mirror.num_blocks > 0)
    _wait(app, lambda: len(window.session.overview) >= 1)
    actions = window.actions_by_name
    window.layouts.save("of a test")
    triggered = []
    for name in [spec.name for spec in actions if spec.name not in LEAVES]:
        if name not in actions:  # a layout that was deleted by an earlier action
            continue
        action = actions[name]
        for _ in range(2 if action.isCheckable() or name.startswith("toggle_") else 1):
            try:
                action.setEnabled(True)
                action.trigger()
                _process_events(app, 2)
            except Exception:
                problems.append(f"{name}: {traceback.format_exc()}")
        triggered.append(name)
        _close_what_was_opened(app, desktop, window)
    window.layouts.delete("of a test")
    desktop.themes.settings.change(zoom_percent=100, palette="usual")
    ratio = window.devicePixelRatioF()
    for name in LEAVES[:1]:
        actions[name].trigger()
        triggered.append(name)
    _close_others(desktop, window)
    _wait(app, lambda: not desktop.windows and not desktop.sessions)
    return {"triggered": triggered, "ratio": ratio}


def _close_others(desktop, window):
    """Close other windows, for example one on the sample recording."""
    for other in [each for each in desktop.windows if each is not window]:
        other.close()


def _close_what_was_opened(app, desktop, window):
    """Close sheets, message boxes, popups and other windows that an action opened."""
    from PySide6.QtWidgets import QDialog

    _close_others(desktop, window)
    for widget in app.topLevelWidgets():
        is_dialog = isinstance(widget, QDialog) or widget.metaObject().className() == "CommandPalette"
        if widget.metaObject().className() == "FleetWindow" and widget.isVisible():
            widget.close()
        if is_dialog and widget.isVisible():
            widget.grab()
            widget.reject() if isinstance(widget, QDialog) else widget.close()
    _process_events(app, 2)


def _process_events(app, times):
    from PySide6.QtCore import QCoreApplication, QEvent

    for _ in range(times):
        app.processEvents()
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


def _wait(app, condition):
    until = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"it did not come about: {[thread.name for thread in threading.enumerate()]}")
        _process_events(app, 1)
        time.sleep(0.005)


def _grown_counts(first, *others):
    """Return the counts that grew after the first window, as (first, last)."""
    return {
        key: (first.get(key, 0), last[key]) for last in others[-1:] for key in last if last[key] > first.get(key, 0)
    }


def _object_counts(app, desktop, num_threads):
    from PySide6.QtCore import QObject, QTimer

    _wait(app, lambda: threading.active_count() <= num_threads)
    _wait(app, lambda: not desktop._cleanup_timer.isActive())
    for _ in range(3):  # let deferred work of the closed window finish
        _process_events(app, 2)
        gc.unfreeze()  # count objects that were frozen while a window was open, too
        gc.collect()
        time.sleep(0.1)
    things = [thing for thing in gc.get_objects() if issubclass(type(thing), QObject)]
    ours = Counter(type(thing).__name__ for thing in things if type(thing).__module__.startswith("kvscope"))
    return {
        "windows": len(app.topLevelWidgets()),
        "widgets": len(app.allWidgets()),
        "timers": sum(isinstance(thing, QTimer) for thing in things),
        "threads": threading.active_count(),
        **{f"our {name}": number for name, number in ours.items()},
    }


def main():
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2:])))


if __name__ == "__main__":
    main()
