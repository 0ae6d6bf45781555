"""Records block texts into the history of a live session if the user agreed: requests them and stores the replies.

Decides which texts are requested and when. Imports no widgets. The user's consent is in the settings.
"""

from __future__ import annotations

import itertools
import time
from typing import Final

from PySide6.QtCore import QObject, QSettings, QTimer

from kvscope_app.session.session import Session
from kvscope_app.setting_names import RECORD_TEXTS
from kvscope_telemetry.block_texts.text_collector import TextCollector
from kvscope_telemetry.messages.commands import BlockText, GetBlockText, Reply
from kvscope_telemetry.source import Update

REQUEST_INTERVAL_MS: Final = 500
MAX_BLOCKS_PER_REQUEST: Final = 320
"""Maximum number of blocks per request."""
_RESTATE_S: Final = 30.0
_MAX_RESTATED: Final = 4096
"""The ring drops its oldest segments. With at most this many blocks, all texts are rewritten periodically."""
_REPLY_TIMEOUT_S: Final = 5.0
_FIRST_TAG: Final = 1 << 44


def text_consent(settings: QSettings) -> bool | None:
    """Whether the user agreed that recordings contain texts; None if never asked."""
    value = str(settings.value(RECORD_TEXTS, ""))
    return None if value not in ("yes", "no") else value == "yes"


def set_text_consent(settings: QSettings, agreed: bool) -> None:
    settings.setValue(RECORD_TEXTS, "yes" if agreed else "no")


class TextRecorder(QObject):
    """Text recording of one live session. Off until `set_on`."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._session = session
        self._collector = TextCollector()
        self._tags = itertools.count(_FIRST_TAG)
        self._tag = 0
        self._asked_s = self._restated_s = time.monotonic()
        self._recorder: object = None
        self._clock = QTimer(self, interval=REQUEST_INTERVAL_MS)
        self._clock.timeout.connect(self.poll)

    @property
    def is_on(self) -> bool:
        return self._clock.isActive()

    def set_on(self, on: bool) -> None:
        if on == self.is_on:
            return
        if on:
            self._collector = TextCollector()
            self._session.timeline.updated.connect(self._on_update)
            self._session.replies.connect(self._on_replies)
            self._clock.start()
        else:
            self._clock.stop()
            self._session.timeline.updated.disconnect(self._on_update)
            self._session.replies.disconnect(self._on_replies)

    def poll(self) -> None:
        """Store received texts and request those that are due."""
        session, now_s = self._session, time.monotonic()
        mirror, kept = session.live_mirror, session.disk_history
        if kept is None or mirror.epoch is None or not session.may_operate:
            return
        recorder = kept.recorder
        if recorder is not self._recorder and (recorder is None or recorder.writer.num_written):
            self._recorder = recorder
            self._collector.forget_written()  # the new file has no texts yet
        elif now_s - self._restated_s > _RESTATE_S and mirror.ledger.num_blocks <= _MAX_RESTATED:
            self._restated_s = now_s
            self._collector.forget_written()
        kept.write_texts(self._collector.confirmed(mirror.ledger, mirror.epoch))
        if self._collector.is_waiting and now_s - self._asked_s > _REPLY_TIMEOUT_S:
            self._collector.forget_asked()
        blocks = self._collector.due(mirror.ledger, mirror.epoch, MAX_BLOCKS_PER_REQUEST)
        if blocks:
            self._tag, self._asked_s = next(self._tags), now_s
            session.send(GetBlockText(blocks=blocks, tag=self._tag))

    def _on_update(self, update: Update) -> None:
        self._collector.changed(None if update.snapshot is not None else update.block_ids)

    def _on_replies(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, BlockText) and reply.tag == self._tag:
                self._collector.add_contents(reply.contents)
