"""Asks the engine what the draft would cost: `DELAY_MS` after its last change, and one question at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.session import Session
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import EstimatePrompt, Failed, PromptEstimate, Reply

DELAY_MS: Final = 300
MAX_WAIT_MS: Final = 10_000
"""Time after which a question without an answer counts as lost, such as one sent before a reconnection."""
_FIRST_TAG: Final = 1 << 47
_tags = itertools.count(_FIRST_TAG)


def next_tag() -> int:
    """Return a tag for a question that no other part of the desktop uses."""
    return next(_tags)


class PromptEstimator(QObject):
    """`command` returns the question about the current draft, or None if there is nothing to ask."""

    changed = Signal()
    """Emitted when `estimate` or `refusal` has changed."""

    def __init__(
        self, session: Session, command: Callable[[], EstimatePrompt | None], parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self.estimate: PromptEstimate | None = None
        """The last answer, None if the draft is empty or nothing is known about it."""
        self.refusal = ""
        """Reason why the engine would refuse the draft; empty if it gave none."""
        self._session = session
        self._command = command
        self._tag = 0
        self._epoch: int | None = None
        self._is_waiting = False
        self._is_outdated = False
        """Whether the draft has changed since the question that is being answered."""
        self._delay = QTimer(self, singleShot=True, interval=DELAY_MS)
        self._delay.timeout.connect(self._ask)
        self._patience = QTimer(self, singleShot=True, interval=MAX_WAIT_MS)
        self._patience.timeout.connect(self._give_up)
        session.replies.connect(self._on_replies)
        session.status_changed.connect(self._on_status)

    def update_later(self) -> None:
        """Ask again once the draft has not changed for `DELAY_MS`."""
        self._delay.start()

    def clear(self) -> None:
        """Drop the estimate, which is that of another prompt."""
        self._delay.stop()
        self._is_outdated = False
        self._end_question()  # an answer that is still to come is ignored
        self._set(None, "")

    def _ask(self) -> None:
        if self._is_waiting:
            self._is_outdated = True
            return
        command = self._command() if self._session.estimates_prompts else None
        if command is None:
            self._set(None, "")
            return
        self._tag, self._epoch = next_tag(), self._session.live_mirror.epoch
        try:
            self._is_waiting = self._session.send(replace(command, tag=self._tag))
        except KvscopeError as error:  # more than a message may have
            self._set(None, str(error))
            return
        if self._is_waiting:
            self._patience.start()

    def _on_status(self) -> None:
        """Ask again if the engine was replaced: its cache and its limits are others."""
        epoch = self._session.live_mirror.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self.clear()
            self.update_later()

    def _on_replies(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, PromptEstimate | Failed) and reply.tag == self._tag and self._is_waiting:
                self._end_question()
                if isinstance(reply, PromptEstimate):
                    self._set(reply, "")
                else:
                    self._set(None, "" if reply.is_unanswered else reply.reason)
                if self._is_outdated:
                    self._is_outdated = False
                    self._ask()

    def _give_up(self) -> None:
        self._end_question()
        self._set(None, "")

    def _end_question(self) -> None:
        self._is_waiting = False
        self._patience.stop()

    def _set(self, estimate: PromptEstimate | None, refusal: str) -> None:
        if (estimate, refusal) != (self.estimate, self.refusal):
            self.estimate, self.refusal = estimate, refusal
            self.changed.emit()
