"""A real desktop, without a display, that does what it is told on its standard input and says what a person would see.

    python told_desktop.py ENDPOINT

Lines in: `record FILE`, `stop`, `look`, `quit`. Lines out: `live`, once telemetry comes and is kept, or it is known
that it cannot be; `recording FILE`, `not FILE`;
`notice …` and `banner …` as they are shown; `at STEP`, what `look` sees.
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


class ToldDesktop(QObject):
    """One window on `endpoint`."""

    def __init__(self, desktop: Desktop, endpoint: str) -> None:
        super().__init__()
        self.window = desktop.open_window(endpoint)
        desktop.offer_crashed_histories()
        self.window.session.noticed.connect(lambda text: tell(f"notice {text}"))
        self._banner = ""
        self._is_live = False
        self._clock = QTimer(self, interval=LOOK_MS)
        self._clock.timeout.connect(self._look)
        self._clock.start()
        self._words = QSocketNotifier(0, QSocketNotifier.Type.Read, self)
        self._words.activated.connect(self._obey)

    def _look(self) -> None:
        session, banner = self.window.session, self.window.banner.text
        kept = session.disk_history
        is_settled = kept is not None and (kept.range_ns is not None or kept.failure)
        if not self._is_live and is_settled and session.mirror.hello is not None:
            self._is_live = True
            tell("live")
        if banner and banner != self._banner:
            tell(f"banner {banner}")
        self._banner = banner

    def _obey(self) -> None:
        words = sys.stdin.readline().split()
        if not words or words[0] == "quit":
            self.window.close()
        elif words[0] == "record":
            record(self.window, words[1])
            recorder = self.window.session.recorder
            is_on = recorder is not None and str(recorder.path) == words[1]
            tell(f"{'recording' if is_on else 'not'} {words[1]}")
        elif words[0] == "stop":
            stop_recording(self.window)
        elif words[0] == "look":
            tell(f"at {self.window.session.mirror.step}")


def tell(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Until it is told to quit."""
    app = make_application()
    settings = QSettings()
    set_text_consent(settings, False)
    desktop = Desktop(app, Options(theme="dark"), settings)
    commanded = ToldDesktop(desktop, sys.argv[1])
    code = app.exec()
    commanded.deleteLater()
    desktop.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
