"""Looks for words in what blocks hold now, by asking the engine: blocks of requests first, then cached ones.

Owns the one question that is open, and how many are asked. Only who may read texts is answered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.look.number_text import count
from kvscope_app.session.session import Session
from kvscope_app.views.inspector.findings import Finding
from kvscope_app.views.places import place_of
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import BlockContent, BlockText, GetBlockText, Reply
from kvscope_telemetry.state.mirror import Mirror

MAX_BLOCKS: Final = 16_384
"""That are asked for, the newest requests' first."""
MAX_FOUND: Final = 12
FEWEST_LETTERS: Final = 2
_AT_A_TIME: Final = 128
_TYPING_MS: Final = 250
_GIVE_UP_MS: Final = 3000
_FIRST_TAG: Final = 1 << 42
_AROUND: Final = 28
Asked = tuple[int, int]
"""A block, and the request in whose table it follows the one before; 0: none."""


class TextSearch(QObject):
    """Searches for one text at a time."""

    found = Signal(object)
    """A `Finding`."""
    changed = Signal()
    """`note` says otherwise."""

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.note = ""
        self._session = session
        self._text = ""
        self._left: Iterator[Asked] = iter(())
        self._open: list[Asked] = []
        self._num_asked = self._num_found = 0
        self._before = (0, 0, "")
        self._tag = 0
        self._tags = itertools.count(_FIRST_TAG)
        self._typing = QTimer(self, singleShot=True, interval=_TYPING_MS)
        self._typing.timeout.connect(self._begin)
        self._give_up = QTimer(self, singleShot=True, interval=_GIVE_UP_MS)
        self._give_up.timeout.connect(lambda: self._end("The engine does not answer about texts"))
        session.replies.connect(self._take)

    def search(self, text: str) -> None:
        """Look for this from now on, once typing has stopped; for nothing, where it is too short."""
        self._end("")
        self._text = text.strip().casefold()
        if len(self._text) < FEWEST_LETTERS or not self._session.takes_commands:
            return
        if not self._session.may_operate:
            self._say("Texts are for operators: you are a viewer at this engine")
        elif self._session.paused:
            self._say("Texts are searched at the live end (End)")
        else:
            self._typing.start()

    def _begin(self) -> None:
        mirror = self._session.live_mirror
        if mirror.hello is not None:
            self._left = itertools.islice(blocks_in_order(mirror), MAX_BLOCKS)
            self._num_asked = self._num_found = 0
            self._before = (0, 0, "")
            self._ask()

    def _ask(self) -> None:
        self._open = list(itertools.islice(self._left, _AT_A_TIME))
        if not self._open:
            self._end(f"Texts of {count(self._num_asked)} blocks were searched")
            return
        self._tag = next(self._tags)
        self._session.send(GetBlockText(blocks=tuple(block for block, _ in self._open), tag=self._tag))
        self._give_up.start()
        self._say(f"Searching texts… {count(self._num_asked)} blocks")

    def _take(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, BlockText) and self._open and reply.tag == self._tag:
                self._read(reply)

    def _read(self, reply: BlockText) -> None:
        asked, self._open = self._open, []
        self._num_asked += len(asked)
        for (block, run), content in zip(asked, reply.contents, strict=False):
            if self._num_found < MAX_FOUND:
                self._match(block, run, content)
        if self._num_found >= MAX_FOUND:
            self._end(f"The first {MAX_FOUND} places with this text")
        else:
            self._ask()

    def _match(self, block: int, run: int, content: BlockContent) -> None:
        """In the block's text, and in the end of the one before it in the same table."""
        before_run, before_block, tail = self._before
        tail = tail if run and run == before_run else ""
        whole = tail + content.text
        at = whole.casefold().find(self._text)
        if at >= 0:
            self._num_found += 1
            self.found.emit(self._finding(before_block if at < len(tail) else block, whole, at))
        keep = len(self._text) - 1
        self._before = (run, block, content.text[-keep:] if at < 0 else "")

    def _finding(self, block: int, text: str, at: int) -> Finding:
        cache = self._session.live_mirror.hello
        assert cache is not None, "an engine answered"
        begin, end = max(at - _AROUND, 0), at + len(self._text) + _AROUND
        snippet = " ".join(text[begin:end].split())
        return Finding(f"“{snippet}”", f"in {place_of(cache.cache, block).name.lower()}", block=block)

    def _end(self, note: str) -> None:
        self._open, self._left = [], iter(())
        self._typing.stop()
        self._give_up.stop()
        self._say(note)

    def _say(self, note: str) -> None:
        if note != self.note:
            self.note = note
            self.changed.emit()


def blocks_in_order(mirror: Mirror) -> Iterator[Asked]:
    """Blocks that hold text, each once: tables of requests, the newest first, then what is cached."""
    seen: set[int] = set()
    requests = mirror.requests
    for row in np.flatnonzero(requests.num_blocks > 0)[::-1].tolist():
        number = int(requests.number[row])
        for block in requests.table(number).tolist():
            if block not in seen:
                seen.add(block)
                yield block, number
    for block in np.flatnonzero(mirror.ledger.state == BlockState.CACHED)[:MAX_BLOCKS].tolist():
        if block not in seen:
            yield block, 0
