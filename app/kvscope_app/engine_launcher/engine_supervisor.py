"""Watches the desktop's own engine and restarts it on request: the Qt side of `EngineProcess`."""

from __future__ import annotations

import time
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.engine_launcher.engine_process import EngineProcess
from kvscope_telemetry.errors import KvscopeError

_POLL_MS: Final = 500
_RESTART_POLL_MS: Final = 100


class EngineSupervisor(QObject):
    """Emits signals when the engine ends or is restarted. Never blocks. The caller owns `engine`."""

    ended = Signal(str)
    """Emitted with the reason when the engine ended by itself or could not be started."""
    started = Signal()
    """Emitted when the engine's process was started again. The engine is not ready yet: it still loads its model."""

    def __init__(self, engine: EngineProcess, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.engine = engine
        self._has_reported = False
        self._kill_at_s: float | None = None
        """Monotonic time at which the old process is killed during a restart; None otherwise."""
        self._timer = QTimer(self, interval=_POLL_MS)
        self._timer.timeout.connect(self._poll)
        self._timer.start()

    @property
    def is_running(self) -> bool:
        return self.engine.is_running

    def restart(self) -> None:
        """Terminate the engine if it runs, then start it again. Returns immediately."""
        self.engine.terminate()
        self._kill_at_s = time.monotonic() + self.engine.end_after_s
        self._timer.start(_RESTART_POLL_MS)
        self._poll()

    def detach(self) -> None:
        """Stop watching. Called before the desktop closes the engine."""
        self._timer.stop()

    def _poll(self) -> None:
        if self._kill_at_s is not None:
            self._continue_restart(self._kill_at_s)
        elif not self.engine.is_running and not self._has_reported:
            self._has_reported = True
            self.ended.emit(self.engine.end_reason() or "unknown reason")

    def _continue_restart(self, kill_at_s: float) -> None:
        if self.engine.is_running:
            if time.monotonic() >= kill_at_s:
                self.engine.kill()
            return
        self._kill_at_s = None
        self._timer.start(_POLL_MS)
        try:
            self.engine.start()
        except KvscopeError as error:
            self._has_reported = True
            self.ended.emit(str(error))
            return
        self._has_reported = False
        self.started.emit()
