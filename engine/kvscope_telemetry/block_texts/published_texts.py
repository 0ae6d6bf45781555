"""Collects block texts in an engine that writes its own recording: requests a few blocks at a time, between steps.

Owns a copy of the ledger as published, and the pending requests. Thread-safe: the publishing thread calls
`add_message`, the engine's thread calls the other methods.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.block_texts.text_collector import TextCollector
from kvscope_telemetry.ledger import Ledger, unpack
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.telemetry import Frame, Snapshot

REQUEST_INTERVAL_S: Final = 0.1
MAX_BLOCKS_PER_REQUEST: Final = 64
"""Maximum number of blocks per request, so that a step is delayed by a few milliseconds only."""


class PublishedTexts:
    """Collects the texts of published blocks. Each text is passed to `write` once the ledger shows that the
    block has not changed since the text was requested.
    """

    def __init__(self, write: Callable[[Iterable[RecordedText]], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._collector = TextCollector()
        self._ledger = Ledger(0)
        self._epoch = 0
        self._next_request_s = 0.0

    def add_message(self, message: Frame | Snapshot) -> None:
        rows = message.blocks
        ids = np.frombuffer(rows.ids, "<u4") if isinstance(message, Frame) else None
        where = slice(None) if ids is None else ids
        with self._lock:
            if isinstance(message, Snapshot):
                self._epoch = message.hello.epoch
                self._ledger = Ledger(len(rows.state))
            for name, column in unpack([rows]).items():
                getattr(self._ledger, name)[where] = column
            self._collector.mark_changed(ids)

    def due(self) -> tuple[int, ...]:
        """Write the confirmed texts, and return the blocks whose texts to request now. Returns no blocks if the
        last call was less than `REQUEST_INTERVAL_S` ago.
        """
        now_s = time.monotonic()
        if now_s < self._next_request_s:
            return ()
        self._next_request_s = now_s + REQUEST_INTERVAL_S
        self.write()
        with self._lock:
            return self._collector.due(self._ledger, self._epoch, MAX_BLOCKS_PER_REQUEST)

    def add_contents(self, contents: Iterable[BlockContent]) -> None:
        with self._lock:
            self._collector.add_contents(contents)

    def write(self) -> None:
        with self._lock:
            texts = self._collector.confirmed(self._ledger, self._epoch)
        self._write(texts)
