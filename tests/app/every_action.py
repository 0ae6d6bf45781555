"""Triggers every action of a real window on a scripted engine over real sockets, and counts what it leaves.

`python -m tests.app.every_action FOLDER THEME…` opens a window a theme in a process of its own, so that it can be at
another scale factor, and prints what happened as JSON. Used by `test_every_action`.
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
"""What ends the window comes last, and is triggered by itself."""
CHILD = ["/bin/sh", "-c", """while read -r _; do echo '{"error": "nothing is worked out here"}'; done"""]
"""In place of the engine's commands: importing torch would take longer than all that a window does."""
WAIT_S = 120.0


def run(folder, themes):
    """What there was to say: exceptions, warnings of Qt, actions that were triggered, and what was left."""
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
    sys.excepthook = lambda *error: problems.append("".join(traceback.format_exception(*error)))  # of slots
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
            stood.append(_standing(app, desktop, num_threads))
        until = time.monotonic() + WAIT_S
        while _left(*stood) and time.monotonic() < until:  # what is still on its way comes to its end
            stood[-1] = _standing(app, desktop, num_threads)
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
        "left": _left(*stood),
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
        if name not in actions:  # a layout that was forgotten meanwhile
            continue
        action = actions[name]
        for _ in range(2 if action.isCheckable() or name.startswith("toggle_") else 1):
            try:
                action.setEnabled(True)
                action.trigger()
                _turn(app, 2)
            except Exception:
                problems.append(f"{name}: {traceback.format_exc()}")
        triggered.append(name)
        _close_what_was_opened(app, desktop, window)
    window.layouts.forget("of a test")
    desktop.themes.settings.change(zoom_percent=100, palette="usual")
    ratio = window.devicePixelRatioF()
    for name in LEAVES[:1]:
        actions[name].trigger()
        triggered.append(name)
    _close_others(desktop, window)
    _wait(app, lambda: not desktop.windows and not desktop.sessions)
    return {"triggered": triggered, "ratio": ratio}


def _close_others(desktop, window):
    """On the sample recording, say."""
    for other in [each for each in desktop.windows if each is not window]:
        other.close()


def _close_what_was_opened(app, desktop, window):
    """Sheets, questions and popups: as Escape does; and other windows."""
    from PySide6.QtWidgets import QDialog

    _close_others(desktop, window)
    for widget in app.topLevelWidgets():
        is_dialog = isinstance(widget, QDialog) or widget.metaObject().className() == "CommandPalette"
        if widget.metaObject().className() == "FleetWindow" and widget.isVisible():
            widget.close()
        if is_dialog and widget.isVisible():
            widget.grab()
            widget.reject() if isinstance(widget, QDialog) else widget.close()
    _turn(app, 2)


def _turn(app, times):
    from PySide6.QtCore import QCoreApplication, QEvent

    for _ in range(times):
        app.processEvents()
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


def _wait(app, is_so):
    until = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"it did not come about: {[thread.name for thread in threading.enumerate()]}")
        _turn(app, 1)
        time.sleep(0.005)


def _left(first, *others):
    """What there is more of after the last window than after the first: before, and then."""
    return {
        key: (first.get(key, 0), last[key]) for last in others[-1:] for key in last if last[key] > first.get(key, 0)
    }


def _standing(app, desktop, num_threads):
    from PySide6.QtCore import QObject, QTimer

    _wait(app, lambda: threading.active_count() <= num_threads)
    _wait(app, lambda: not desktop._forgetting.isActive())
    for _ in range(3):  # what was on its way when the window closed comes to its end
        _turn(app, 2)
        gc.unfreeze()  # what was set aside while a window was open is counted, and collected, as all else
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
    """In a process of its own."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2:])))


if __name__ == "__main__":
    main()
