"""Records block texts into the history of a live session if the user agreed: requests them and stores the replies.

Decides which texts are requested and when. Contains no widgets. The user's consent is in the settings.
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
_REWRITE_INTERVAL_S: Final = 30.0
_MAX_REWRITTEN_BLOCKS: Final = 4096
"""Maximum number of blocks in a pool for which all texts are written again periodically.

Texts are written again because the ring drops its oldest segments.
"""
_REPLY_TIMEOUT_S: Final = 5.0
_FIRST_TAG: Final = 1 << 44


def text_consent(settings: QSettings) -> bool | None:
    """Return whether the user agreed that recordings contain texts, or None if the user was not asked yet."""
    value = str(settings.value(RECORD_TEXTS, ""))
    return None if value not in ("yes", "no") else value == "yes"


def set_text_consent(settings: QSettings, agreed: bool) -> None:
    settings.setValue(RECORD_TEXTS, "yes" if agreed else "no")


class TextRecorder(QObject):
    """Records the block texts of one live session while the recorder is on. It is off at first."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._session = session
        self._collector = TextCollector()
        self._tags = itertools.count(_FIRST_TAG)
        self._tag = 0
        self._last_request_s = self._last_rewrite_s = time.monotonic()
        self._recorder: object = None
        self._poll_timer = QTimer(self, interval=REQUEST_INTERVAL_MS)
        self._poll_timer.timeout.connect(self.poll)

    @property
    def is_on(self) -> bool:
        return self._poll_timer.isActive()

    def set_on(self, on: bool) -> None:
        if on == self.is_on:
            return
        if on:
            self._collector = TextCollector()
            self._session.timeline.updated.connect(self._on_update)
            self._session.replies.connect(self._on_replies)
            self._poll_timer.start()
        else:
            self._poll_timer.stop()
            self._session.timeline.updated.disconnect(self._on_update)
            self._session.replies.disconnect(self._on_replies)

    def poll(self) -> None:
        session, now_s = self._session, time.monotonic()
        mirror, disk_history = session.live_mirror, session.disk_history
        if disk_history is None or mirror.epoch is None or not session.may_operate:
            return
        recorder = disk_history.recorder
        if recorder is not self._recorder and (recorder is None or recorder.writer.num_written):
            self._recorder = recorder
            self._collector.forget_written()  # the new file has no texts yet
        elif now_s - self._last_rewrite_s > _REWRITE_INTERVAL_S and mirror.ledger.num_blocks <= _MAX_REWRITTEN_BLOCKS:
            self._last_rewrite_s = now_s
            self._collector.forget_written()
        disk_history.write_texts(self._collector.confirmed(mirror.ledger, mirror.epoch))
        if self._collector.is_waiting and now_s - self._last_request_s > _REPLY_TIMEOUT_S:
            self._collector.drop_pending()
        blocks = self._collector.due(mirror.ledger, mirror.epoch, MAX_BLOCKS_PER_REQUEST)
        if blocks:
            self._tag, self._last_request_s = next(self._tags), now_s
            session.send(GetBlockText(blocks=blocks, tag=self._tag))

    def _on_update(self, update: Update) -> None:
        self._collector.mark_changed(None if update.snapshot is not None else update.block_ids)

    def _on_replies(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, BlockText) and reply.tag == self._tag:
                self._collector.add_contents(reply.contents)
