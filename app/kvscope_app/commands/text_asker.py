"""Asks an engine what its blocks hold, for a recording without a window. Owns what is asked; knows no file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from kvscope_telemetry.errors import EngineDead
from kvscope_telemetry.messages.commands import BlockText, GetBlockText
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.texts.block_texts import RecordedText
from kvscope_telemetry.texts.text_collector import TextCollector

ASK_EVERY_S: Final = 0.5
MAX_ASKED: Final = 512
_GIVE_UP_S: Final = 5.0


class TextAsker:
    """Follows `source` with its mirror; call `look` often."""

    def __init__(self, source: LiveSource, write: Callable[[Iterable[RecordedText]], object]) -> None:
        self._source, self._write = source, write
        self._collector = TextCollector()
        self._tag = 0
        self._num_files = 1
        self._next_s = self._asked_s = 0.0

    def look(self, num_files: int = 1) -> None:
        """Take what came, ask for what is due, write what is sure. `num_files` were begun: each is to have all."""
        if num_files != self._num_files:
            self._num_files = num_files
            self._collector.forget_written()
        update = self._source.update_mirror()
        if update is not None:
            self._collector.changed(None if update.snapshot is not None else update.block_ids)
        for reply in self._source.take_replies():
            if isinstance(reply, BlockText) and reply.tag == self._tag:
                self._collector.take(reply.contents)
        mirror, now_s = self._source.mirror, time.monotonic()
        if mirror.epoch is None or now_s < self._next_s:
            return
        self._next_s = now_s + ASK_EVERY_S
        self._write(self._collector.confirmed(mirror.ledger, mirror.epoch))
        if self._collector.is_waiting and now_s - self._asked_s > _GIVE_UP_S:
            self._collector.forget_asked()
        self._ask(self._collector.due(mirror.ledger, mirror.epoch, MAX_ASKED), now_s)

    def _ask(self, blocks: tuple[int, ...], now_s: float) -> None:
        if not blocks:
            return
        self._tag += 1
        self._asked_s = now_s
        try:
            self._source.send(GetBlockText(blocks=blocks, tag=self._tag))
        except EngineDead:
            self._collector.forget_asked()
