"""A real app without a display that follows commands on its standard input and prints what a person would see.

    python scripted_desktop.py ENDPOINT

Lines in: `record FILE`, `stop`, `look`, `quit`. Lines out: `live`, once all views are loaded and telemetry arrives and
is kept, or it is known that it cannot be kept; `recording FILE`, `not FILE`; `notice …` and `banner …` as they are
shown; `at STEP`, the answer to `look`.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

from PySide6.QtCore import QObject, QSettings, QSocketNotifier, QTimer

from kvscope_app.application import make_application
from kvscope_app.command_line import Options
from kvscope_app.desktop import Desktop
from kvscope_app.recording.recording_actions import record, stop_recording
from kvscope_app.session.recording.text_recorder import set_text_consent

LOOK_MS = 50


class ScriptedDesktop(QObject):
    """One window on `endpoint`."""

    def __init__(self, desktop: Desktop, endpoint: str) -> None:
        super().__init__()
        self.window = desktop.open_window(endpoint)
        desktop.offer_crashed_histories()
        self.window.session.noticed.connect(lambda text: print_line(f"notice {text}"))
        self._banner = ""
        self._is_live = self._is_loaded = False
        self.window.views_loaded.connect(self._on_loaded)
        self._clock = QTimer(self, interval=LOOK_MS)
        self._clock.timeout.connect(self._look)
        self._clock.start()
        self._words = QSocketNotifier(0, QSocketNotifier.Type.Read, self)
        self._words.activated.connect(self._follow_command)

    def _on_loaded(self) -> None:
        self._is_loaded = True

    def _look(self) -> None:
        session, banner = self.window.session, self.window.banner.text
        kept = session.disk_history
        is_settled = kept is not None and (kept.range_ns is not None or kept.failure)
        if not self._is_live and self._is_loaded and is_settled and session.mirror.hello is not None:
            self._is_live = True
            print_line("live")
        if banner and banner != self._banner:
            print_line(f"banner {banner}")
        self._banner = banner

    def _follow_command(self) -> None:
        words = sys.stdin.readline().split()
        if not words or words[0] == "quit":
            self.window.close()
        elif words[0] == "record":
            record(self.window, words[1])
            recorder = self.window.session.recorder
            is_on = recorder is not None and str(recorder.path) == words[1]
            print_line(f"{'recording' if is_on else 'not'} {words[1]}")
        elif words[0] == "stop":
            stop_recording(self.window)
        elif words[0] == "look":
            print_line(f"at {self.window.session.mirror.step}")


def print_line(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Run until `quit`."""
    app = make_application()
    settings = QSettings()
    set_text_consent(settings, False)
    desktop = Desktop(app, Options(theme="dark"), settings)
    commanded = ScriptedDesktop(desktop, sys.argv[1])
    code = app.exec()
    commanded.deleteLater()
    desktop.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
