"""Send seeded random input to windows, and report problems and leaked objects.

`python -m tests.app.window_storm FOLDER KIND SEED EVENTS` prints a JSON object. KIND is `recording`, `live` (a scripted
engine over real sockets) or `compare`. It runs in its own process: a crash of Qt ends it, and a hang prints all stacks.
Used by `test_window_storm`.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

HANG_S = 120
"""Longest time for one event, on a busy machine."""
WAIT_S = 120.0
MAX_WINDOWS = 2
POPUP_MS = 10
LEAVING = ("close", "quit")
"""Actions that end windows, which are never triggered."""
HARMLESS = ("This plugin does not support", "Unhandled key code")
KEYS = "abcxyz0159 ./:-_,?*()[]"


class Storm:
    """Generator of random events for the windows of `desktop`; files are read and written in `folder`."""

    def __init__(self, app, desktop, folder, seed):
        from PySide6.QtCore import QTimer

        self.app, self.desktop, self.folder = app, desktop, folder
        self.random = random.Random(seed)
        self.log = []
        self.popups = QTimer(app)
        self.popups.setInterval(POPUP_MS)
        self.popups.timeout.connect(self._answer_popup)
        self.popups.start()

    def run(self, num_events):
        kinds = (
            *([self.click] * 8 + [self.key] * 6 + [self.action] * 6),
            *(self.double_click, self.context_menu, self.dock, self.drop, self.drag, self.wheel, self.resize),
        )
        try:
            for _ in range(num_events):
                kind = self.random.choice(kinds)
                self.log.append(f"{len(self.log)} {kind.__name__}")
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                window = self.window()
                if window is not None:
                    kind(window)
                self.turn()
                self.answer_dialogs()
        finally:
            # dialogs left open would hide the exception from the report
            faulthandler.cancel_dump_traceback_later()
            for _ in range(50):
                self.answer_dialogs(always=True)

    def turn(self):
        from PySide6.QtCore import QCoreApplication, QEvent

        self.app.processEvents()
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)

    # events

    def click(self, window, kind="mouseClick", right=False):
        import shiboken6
        from PySide6.QtCore import QPoint, Qt
        from PySide6.QtTest import QTest

        widget = self.widget(window)
        if widget is not None:
            at = QPoint(self.random.randrange(widget.width()), self.random.randrange(widget.height()))
            which = Qt.MouseButton.RightButton if right else Qt.MouseButton.LeftButton
            QTest.mouseMove(widget, at)
            if shiboken6.isValid(widget):  # moving the mouse runs the event loop, which may delete the widget
                getattr(QTest, kind)(widget, which, self.modifier(), at)

    def double_click(self, window):
        self.click(window, "mouseDClick")

    def context_menu(self, window):
        from PySide6.QtCore import QPoint
        from PySide6.QtGui import QContextMenuEvent
        from PySide6.QtWidgets import QApplication

        widget = self.widget(window)
        if widget is not None:
            at = QPoint(self.random.randrange(widget.width()), self.random.randrange(widget.height()))
            event = QContextMenuEvent(QContextMenuEvent.Reason.Mouse, at, widget.mapToGlobal(at))
            QApplication.sendEvent(widget, event)

    def drag(self, window):
        import shiboken6
        from PySide6.QtCore import QPoint, Qt
        from PySide6.QtTest import QTest

        widget = self.widget(window)
        if widget is not None:
            points = [
                QPoint(self.random.randrange(widget.width()), self.random.randrange(widget.height())) for _ in range(3)
            ]
            QTest.mousePress(widget, Qt.MouseButton.LeftButton, self.modifier(), points[0])
            for point in points:
                if shiboken6.isValid(widget):
                    QTest.mouseMove(widget, point)
            if shiboken6.isValid(widget):
                QTest.mouseRelease(widget, Qt.MouseButton.LeftButton, self.modifier(), points[-1])

    def wheel(self, window):
        from PySide6.QtCore import QPoint, QPointF, Qt
        from PySide6.QtGui import QWheelEvent
        from PySide6.QtWidgets import QApplication

        widget = self.widget(window)
        if widget is not None:
            at = QPointF(widget.rect().center())
            turned = QPoint(0, self.random.choice((-960, -120, 120, 960)))
            event = QWheelEvent(
                *(at, widget.mapToGlobal(at), QPoint(), turned, Qt.MouseButton.NoButton, self.modifier()),
                *(Qt.ScrollPhase.NoScrollPhase, False),
            )
            QApplication.sendEvent(widget, event)

    def key(self, window):
        from PySide6.QtCore import Qt
        from PySide6.QtTest import QTest
        from PySide6.QtWidgets import QApplication

        names = ("Tab", "Backtab", "Return", "Escape", "Left", "Right", "Up", "Down", "Home", "End", "PageUp", "Delete")
        target = QApplication.focusWidget() or window
        if self.random.random() < 0.5:
            QTest.keyClicks(target, "".join(self.random.choices(KEYS, k=self.random.randrange(1, 6))))
        else:
            QTest.keyClick(target, getattr(Qt.Key, f"Key_{self.random.choice(names)}"), self.modifier())

    def action(self, window):
        actions = getattr(window, "actions_by_name", None)
        names = [spec.name for spec in actions or () if spec.name not in LEAVING and actions[spec.name].isEnabled()]
        if names:
            name = self.random.choice(names)
            self.log[-1] += f" {name}"
            actions[name].trigger()

    def dock(self, window):
        from PySide6.QtCore import Qt

        docks = getattr(window, "docks", None)
        if not docks:
            return
        first, second = self.random.sample(sorted(docks), 2)
        areas = (Qt.DockWidgetArea.LeftDockWidgetArea, Qt.DockWidgetArea.RightDockWidgetArea)
        moves = (
            lambda: docks[first].setFloating(not docks[first].isFloating()),
            lambda: docks[first].setVisible(docks[first].isHidden()),
            docks[first].raise_,
            lambda: window.addDockWidget(self.random.choice(areas), docks[first]),
            lambda: window.tabifyDockWidget(docks[second], docks[first]),
            lambda: window.splitDockWidget(docks[second], docks[first], self.random.choice(list(Qt.Orientation))),
            lambda: window.resizeDocks([docks[first]], [self.random.randrange(1, 900)], Qt.Orientation.Horizontal),
        )
        self.random.choice(moves)()

    def drop(self, window):
        from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QUrl
        from PySide6.QtGui import QDragEnterEvent, QDropEvent
        from PySide6.QtWidgets import QApplication

        data = QMimeData()
        paths = self.random.sample(sorted(self.folder.glob("dropped/*")), self.random.randrange(1, 3))
        data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
        how = (Qt.DropAction.CopyAction, data, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier)
        QApplication.sendEvent(window, QDragEnterEvent(QPoint(20, 20), *how))
        QApplication.sendEvent(window, QDropEvent(QPointF(20, 20), *how))

    def resize(self, window):
        window.resize(self.random.randrange(200, 1500), self.random.randrange(150, 950))

    # windows and widgets

    def window(self):
        """Return one of the open windows, after closing those beyond `MAX_WINDOWS`."""
        windows = [*self.desktop.windows, *self.desktop.comparisons]
        if len(windows) > MAX_WINDOWS:
            windows[self.random.randrange(1, len(windows))].close()
            self.turn()
            windows = [*self.desktop.windows, *self.desktop.comparisons]
        return self.random.choice(windows) if windows else None

    def widget(self, window):
        """Return a visible widget, inside the modal dialog if one is open."""
        from PySide6.QtWidgets import QWidget

        around = self.app.activeModalWidget() or window
        parts = [
            part for part in around.findChildren(QWidget) if part.isVisible() and not part.visibleRegion().isEmpty()
        ]
        return self.random.choice(parts) if parts else None

    def modifier(self):
        from PySide6.QtCore import Qt

        kinds = Qt.KeyboardModifier
        return self.random.choice((*[kinds.NoModifier] * 6, kinds.ShiftModifier, kinds.ControlModifier))

    def answer_dialogs(self, *, always=False):
        """Accept or reject some open dialogs, or type a file name."""
        import shiboken6
        from PySide6.QtWidgets import QDialog, QFileDialog

        for widget in self.app.topLevelWidgets():
            if not shiboken6.isValid(widget):  # deleted together with a dialog that was answered before
                continue
            if not widget.isVisible() or not (always or self.random.random() < 0.3):
                continue
            if isinstance(widget, QFileDialog) and not always and self.random.random() < 0.5:
                widget.selectFile(
                    str(self.folder / "saved" / self.random.choice(("a.mcap", "b.csv", "c.json", "d" * 300)))
                )
            if isinstance(widget, QDialog):
                widget.accept() if not always and self.random.random() < 0.5 else widget.reject()
            elif type(widget).__name__ in ("CommandPalette", "FleetWindow", "OpeningWindow"):
                widget.close()
        self.turn()

    def _answer_popup(self):
        """Choose an entry of an open menu or close it; menus and message boxes of file dialogs run their own event
        loop.
        """
        from PySide6.QtWidgets import QFileDialog, QMessageBox

        modal = self.app.activeModalWidget()
        if isinstance(modal, QMessageBox) and isinstance(modal.parent(), QFileDialog):
            modal.reject()
        popup = self.app.activePopupWidget()
        if popup is None:
            return
        actions = [action for action in popup.actions() if action.isEnabled() and not action.isSeparator()]
        actions = [action for action in actions if action.menu() is None and action.objectName() not in LEAVING]
        if actions and self.random.random() < 0.5:
            action = self.random.choice(actions)
            self.log[-1] += f" menu: {action.text()}"
            popup.close()
            action.trigger()
        else:
            popup.close()


def run(folder, kind, seed, num_events):
    """Return problems, Qt warnings, the last events, and objects that remain after all windows were closed."""
    from PySide6.QtCore import QSettings, qInstallMessageHandler
    from PySide6.QtGui import QDesktopServices
    from tests.simulated_engine.engine import SimulatedEngine
    from tests.simulated_engine.server import SimulatedServer

    from kvscope_app.application import make_application
    from kvscope_app.command_line import Options
    from kvscope_app.desktop import Desktop
    from kvscope_app.planning import plan_process
    from kvscope_app.window.override_errors import remove_placeholder

    problems, warnings = [], []
    plan_process.engine_command = lambda *_: ["/bin/sh", "-c", 'while read -r _; do echo \'{"error": "none"}\'; done']
    QDesktopServices.openUrl = lambda *_: True
    qInstallMessageHandler(lambda _kind, _where, text: warnings.append(text))
    storm = None

    def note(*error):
        remove_placeholder(error[1])
        problems.append("".join(traceback.format_exception(*error)) + str(storm.log[-5:] if storm is not None else ""))

    sys.excepthook = note
    sys.unraisablehook = lambda args: note(args.exc_type, args.exc_value, args.exc_traceback)
    threading.excepthook = lambda args: note(args.exc_type, args.exc_value, args.exc_traceback)
    app = make_application()
    settings = QSettings(str(folder / "settings.ini"), QSettings.Format.IniFormat)
    _make_files(folder)
    desktop = Desktop(app, Options(theme="dark"), settings)
    server = None
    if kind == "live":
        engine = SimulatedEngine(num_blocks=120, num_running=6)
        server = SimulatedServer(engine, f"ipc://{folder}/telemetry", rate=20.0)
    storm = Storm(app, desktop, folder, seed)
    try:
        _open(desktop, folder, kind)
        deadline = time.monotonic() + 3  # wait for the first views only, so that input arrives while others load
        while time.monotonic() < deadline:
            storm.turn()
        storm.run(num_events * 4 // 5)
        if server is not None:
            server.close(goodbye=seed % 2 == 0)  # the engine stops while windows watch it
        storm.run(num_events - num_events * 4 // 5)
    except Exception as error:
        note(type(error), error, error.__traceback__)
    storm.popups.stop()
    _close_all(desktop)
    if server is not None:
        server.close()
    left = _left(app, desktop, storm)
    desktop.close()
    return {
        "problems": problems,
        "warnings": [text for text in warnings if not any(each in text for each in HARMLESS)],
        "num_events": len(storm.log),
        "left": left,
    }


def _close_all(desktop):
    for window in [*desktop.windows, *desktop.comparisons]:
        window.close()


def _make_files(folder):
    from kvscope_telemetry.recordings.sample import sample_recording

    for name in ("saved", "dropped", "tmp"):
        (folder / name).mkdir()
    whole = sample_recording().read_bytes()
    (folder / "dropped" / "whole.mcap").write_bytes(whole)
    (folder / "dropped" / "cut.mcap").write_bytes(whole[: len(whole) // 2])
    (folder / "dropped" / "no recording.mcap").write_bytes(b"nothing of the kind")
    (folder / "dropped" / "layout.json").write_text('{"kvscope_layout": 1}')


def _open(desktop, folder, kind):
    from kvscope_telemetry.recordings.reader import Recording
    from kvscope_telemetry.recordings.sample import hybrid_recording, sample_recording

    if kind == "live":
        desktop.attach(f"ipc://{folder}/telemetry")
    elif kind == "recording":
        desktop.open_recording(Recording.open(sample_recording()))
    else:
        desktop.compare(Recording.open(sample_recording()), Recording.open(hybrid_recording()))


def _left(app, desktop, storm):
    """Return windows, sessions and threads that remain some time after all windows were closed."""
    from PySide6.QtWidgets import QMainWindow

    from kvscope_app.compare.compare_window import CompareWindow
    from kvscope_app.window.main_window import MainWindow

    deadline = time.monotonic() + WAIT_S
    while True:
        for _ in range(20):
            storm.turn()
            time.sleep(0.01)
        gc.unfreeze()
        gc.collect()
        windows = [type(each).__name__ for each in app.topLevelWidgets() if isinstance(each, QMainWindow)]
        windows += [type(each).__name__ for each in gc.get_objects() if type(each) in (MainWindow, CompareWindow)]
        threads = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
        threads = [name for name in threads if not name.startswith("Thread-")]
        found = {"windows": windows, "sessions": len(desktop.sessions), "threads": threads}
        if not any(found.values()):
            return {}
        if time.monotonic() > deadline:
            return {key: value for key, value in found.items() if value}


def main():
    from kvscope_app.window.override_errors import call_with_exception_objects

    folder = Path(sys.argv[1])
    os.environ |= {"QT_QPA_PLATFORM": "offscreen", "TMPDIR": str(folder / "tmp"), "HOME": str(folder)}
    os.chdir(folder)
    faulthandler.enable()
    storm = partial(run, folder, sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(call_with_exception_objects(storm)))


if __name__ == "__main__":
    main()
