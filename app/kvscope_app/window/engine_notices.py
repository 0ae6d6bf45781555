"""Shows the state of the engine: loading progress, and a banner with possible actions after it ended."""

from __future__ import annotations

import sys
from typing import Final

from PySide6.QtCore import QObject

from kvscope_app.engine_launcher.engine_supervisor import EngineSupervisor
from kvscope_app.recording.recording_actions import HISTORY_NOT_STORED
from kvscope_app.window.dialogs.attach_dialog import AttachDialog
from kvscope_app.window.dialogs.help_dialogs import log_dialog
from kvscope_app.window.welcome import progress_text
from kvscope_app.window.window_body import WindowBody
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.messages.commands import Failed, Reply
from kvscope_telemetry.messages.telemetry import Progress
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.source import SourceState, Update

_NOTICE_MS: Final = 6000
_RESTARTING: Final = "Restarting the engine…"
_LAST_STATE: Final = "Showing the last known state."


class EngineNotices(QObject):
    """Connects the session and the engine supervisor of one window to its banner and welcome page."""

    def __init__(self, window: WindowBody, supervisor: EngineSupervisor | None) -> None:
        super().__init__(window)
        self._window = window
        self._supervisor = supervisor
        self._ended_epoch: int | None = None
        self._has_ended = False
        self._connecting_reason = ""
        session = window.session
        session.timeline.updated.connect(self._on_update)
        session.status_changed.connect(self._on_status)
        session.replies.connect(self._on_replies)
        session.noticed.connect(lambda text: window.statusBar().showMessage(text, _NOTICE_MS))
        session.history_failed.connect(lambda text: window.banner.show_message(text, HISTORY_NOT_STORED))
        if supervisor is not None:
            supervisor.ended.connect(self.engine_ended)
            supervisor.started.connect(self._engine_started)
        else:
            activity = "Connecting" if not session.timeline.is_file else "Opening the recording"
            window.welcome.show_waiting(activity, session.source.name)

    def detach(self) -> None:
        if self._supervisor is not None:
            self._supervisor.detach()

    def restart(self) -> None:
        if self._supervisor is not None:
            self._has_ended, self._ended_epoch = True, self._window.session.live_mirror.epoch
            self._window.banner.show_message(_RESTARTING, _LAST_STATE)
            self._supervisor.restart()

    def restart_with(self, flag: str, value: str) -> None:
        if self._supervisor is not None:
            self._supervisor.engine.set_option(flag, value)
            self.restart()

    def show_log(self) -> None:
        if self._supervisor is not None:
            log_dialog(self._window, self._supervisor.engine.log_text()).show()

    def engine_ended(self, reason: str) -> None:
        self._has_ended = True
        self._window.session.set_end_reason(reason)
        self._ended_epoch = self._window.session.live_mirror.epoch
        has_state = self._ended_epoch is not None
        self._window.banner.show_message(
            f"The engine ended: {reason}" if has_state else "The engine stopped before it was ready",
            _LAST_STATE if has_state else reason,
            (("Restart engine", self.restart), ("Show log", self.show_log)),
        )
        self._window.welcome.show_ended("The engine stopped before it was ready", reason)

    def _engine_started(self) -> None:
        self._window.session.set_end_reason("")
        self._window.welcome.show_waiting("Starting the engine", "")

    def _on_update(self, update: Update) -> None:
        mirror = self._window.session.live_mirror
        if update.progress is not None and update.progress.stage != "ready":
            self._show_progress(update.progress)
        if mirror.hello is not None:
            self._window.show_map()
        if update.snapshot is not None and mirror.epoch != self._ended_epoch:
            self._window.banner.hide()
            self._has_ended, self._ended_epoch = False, None

    def _show_progress(self, progress: Progress) -> None:
        self._window.welcome.show_progress(progress)
        if self._window.banner.text == _RESTARTING:
            self._window.banner.show_message(
                _RESTARTING, f"{progress.stage.capitalize()} {progress_text(progress)}. {_LAST_STATE}"
            )

    def _on_status(self) -> None:
        status, banner = self._window.session.status, self._window.banner
        if status.state is SourceState.REFUSED:
            self._on_refused(status.reason)
        elif status.state is SourceState.ENDED:
            if self._supervisor is None and not self._has_ended:  # for kvscope's own engine, the supervisor reports it
                self._on_source_ended(status.reason)
        elif status.state is SourceState.CONNECTING and self._supervisor is None:
            self._show_connecting(status.reason)
        elif status.state is SourceState.STUCK and not banner.isVisible():
            banner.show_message(
                f"The engine is stuck: {status.reason}", "It is alive, but its current step does not finish."
            )
        elif status.state in (SourceState.LIVE, SourceState.PAUSED) and self._is_message_outdated(banner.text):
            self._has_ended = False
            banner.hide()

    def _show_connecting(self, reason: str) -> None:
        """Show why connecting has failed so far, and offer to change the address or to cancel."""
        if reason == self._connecting_reason:
            return
        self._connecting_reason = reason
        window, name = self._window, self._window.session.source.name
        if not reason:
            window.welcome.show_waiting("Connecting", name)
            return
        change = (("Change address…", self._change_address),) if window.openers.attach is not None else ()
        detail = f"{reason[0].upper()}{reason[1:]}.\n{name} is retried automatically."
        window.welcome.show_waiting("No engine responds", detail, (*change, ("Cancel", self._cancel)))

    def _cancel(self) -> None:
        self._window.close()

    def _change_address(self) -> None:
        window = self._window

        def attach(address: Address) -> None:
            assert window.openers.attach is not None, "it is offered where one can attach"
            window.openers.attach(address)
            window.close()

        AttachDialog(window, attach, address_text=window.session.source.name).show()

    def _is_message_outdated(self, message: str) -> bool:
        has_reconnected = self._supervisor is None and self._has_ended
        return has_reconnected or message.startswith("The engine is stuck")

    def _on_refused(self, reason: str) -> None:
        if self._window.banner.text != reason:
            print_line(f"kvscope: {reason}", file=sys.stderr)
            self._window.banner.show_message(reason, "Retrying automatically.")
            self._window.welcome.show_ended("The engine denied access", reason)
            self._has_ended = True

    def _on_source_ended(self, reason: str) -> None:
        self._has_ended, self._ended_epoch = True, self._window.session.live_mirror.epoch
        self._window.banner.show_message(f"The engine ended: {reason}", f"{_LAST_STATE} Reconnects automatically.")

    def _on_replies(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Failed) and reply.reason:
                self._window.statusBar().showMessage(reply.reason, _NOTICE_MS)
