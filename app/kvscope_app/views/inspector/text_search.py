"""Search in the text of blocks at the time shown: blocks of requests first, then cached ones. If texts were recorded,
other times are searched afterwards.

Owns the queue of blocks to read, and the status text. The session supplies the blocks' texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.background import Background
from kvscope_app.session.background_watch import BackgroundWatch
from kvscope_app.session.block_texts.session_texts import lookup_of
from kvscope_app.session.session import Session
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import count, plural
from kvscope_app.views.block_locations import locate_block
from kvscope_app.views.inspector.findings import Finding
from kvscope_telemetry.block_texts.block_texts import BlockTextLookup, RecordedText
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.mirror.mirror import Mirror

MAX_BLOCKS: Final = 16_384
"""Maximum number of blocks that are searched, those of the newest requests first."""
MAX_MATCHES: Final = 12
MIN_CHARS: Final = 2
_BLOCKS_PER_PORTION: Final = 1024
_TYPING_MS: Final = 250
_REPLY_TIMEOUT_MS: Final = 3000
_CONTEXT_CHARS: Final = 28


@dataclass(frozen=True, slots=True)
class SearchBlock:
    lookup: BlockTextLookup
    run: int
    """Number of the request in whose block table this block directly follows the previously searched block; 0 if it
    follows in none.
    """


class TextSearch(QObject):
    """Search for one text at a time. `note` is the status text."""

    found = Signal(object)
    changed = Signal()

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.note = ""
        self._session = session
        self._text = ""
        self._remaining: Iterator[SearchBlock] = iter(())
        self._pending: list[SearchBlock] = []
        self._num_read = self._num_without_text = self._num_found = 0
        self._previous: tuple[int, int, str] = (0, 0, "")
        self._typing_timer = QTimer(self, singleShot=True, interval=_TYPING_MS)
        self._typing_timer.timeout.connect(self._start)
        self._reply_timer = QTimer(self, singleShot=True, interval=_REPLY_TIMEOUT_MS)
        self._reply_timer.timeout.connect(self._on_reply_timeout)
        self._other_times: BackgroundWatch | None = None
        session.texts.arrived.connect(self._search_portion)

    def search(self, text: str) -> None:
        """Search for `text` after a short delay for typing. A text shorter than `MIN_CHARS` ends the search."""
        self._stop("")
        self._text = text.strip().casefold()
        if len(self._text) < MIN_CHARS:
            return
        if why_none := self._session.texts.why_no_texts:
            self._set_note(why_none)
        else:
            self._typing_timer.start()

    def _start(self) -> None:
        mirror = self._session.mirror
        if mirror.hello is None:
            return
        blocks = (SearchBlock(lookup_of(mirror, block), run) for block, run in blocks_in_order(mirror))
        self._remaining = itertools.islice(blocks, MAX_BLOCKS)
        self._num_read = self._num_without_text = self._num_found = 0
        self._previous = (0, 0, "")
        self._read_more()

    def _read_more(self) -> None:
        self._pending = list(itertools.islice(self._remaining, _BLOCKS_PER_PORTION))
        if not self._pending:
            self._search_other_times()
            return
        self._set_note(f"Searching texts… {plural(self._num_read, 'block')}")
        self._reply_timer.start()
        self._session.texts.request(self, [block.lookup for block in self._pending])
        self._search_portion()

    def _search_portion(self) -> None:
        texts = self._session.texts
        if not self._pending or any(texts.is_pending(block.lookup) for block in self._pending):
            return
        self._reply_timer.stop()
        portion, self._pending = self._pending, []
        for block in portion:
            content = texts.get(block.lookup)
            if content is None:
                self._num_without_text += 1
                self._previous = (0, 0, "")
                continue
            self._num_read += 1
            if self._num_found < MAX_MATCHES:
                self._match(block, content.text)
        if self._num_found >= MAX_MATCHES:
            self._stop(f"The first {MAX_MATCHES} places with this text. {_HOW_NEXT}")
        else:
            self._read_more()

    def _search_other_times(self) -> None:
        recorded = self._session.recorded_texts
        if recorded is None:
            self._stop(self._summary())
            return
        self._set_note("Searching other times…")
        search = recorded.search(self._text, MAX_MATCHES + _MAX_DUPLICATES)
        self._other_times = BackgroundWatch(search, partial(self._show_other_times, search), self)

    def _show_other_times(self, search: Background[list[RecordedText]]) -> None:
        self._other_times = None
        matches, failure = search.result or [], search.failure
        mirror = self._session.mirror
        shown_hashes = set(mirror.ledger.hash[mirror.ledger.hash != 0].tolist())
        unshown = [text for text in matches if text.epoch != mirror.epoch or not _is_shown(text, mirror, shown_hashes)]
        for text in unshown[: MAX_MATCHES - self._num_found]:
            offset = max(text.text.casefold().find(self._text), 0)
            self._num_found += 1
            self.found.emit(self._finding(text.block, text.text, offset, text))
        self._stop(self._summary() + (f" Other times could not be searched: {failure}." if failure else ""))

    def _match(self, search_block: SearchBlock, text: str) -> None:
        """Search one block's text, including matches that begin in the previous block of the same table."""
        block = search_block.lookup.block
        previous_run, previous_block, tail = self._previous
        tail = tail if search_block.run and search_block.run == previous_run else ""
        joined_text = tail + text
        folded_text = joined_text.casefold()
        offset = folded_text.find(self._text)
        if 0 <= offset < len(tail):
            self._emit_finding(previous_block, joined_text, offset)
            offset = folded_text.find(self._text, len(tail))
        if offset >= 0:
            self._emit_finding(block, joined_text, offset)
        num_kept = len(self._text) - 1
        self._previous = (search_block.run, block, text[-num_kept:] if offset < 0 else "")

    def _emit_finding(self, block: int, text: str, offset: int) -> None:
        self._num_found += 1
        self.found.emit(self._finding(block, text, offset))

    def _finding(self, block: int, text: str, offset: int, recorded: RecordedText | None = None) -> Finding:
        hello = self._session.mirror.hello
        assert hello is not None, "there are blocks only once there is an engine"
        begin, end = max(offset - _CONTEXT_CHARS, 0), offset + len(self._text) + _CONTEXT_CHARS
        snippet = " ".join(text[begin:end].split())
        location = f"in {locate_block(hello.cache, block).name.lower()}"
        if recorded is None:
            return Finding(f"“{snippet}”", location, block=block, is_text=True)
        time_ns, epoch = recorded.time_ns, recorded.epoch
        detail = f"{location} at {clock_text(time_ns)[:8]}"
        return Finding(f"“{snippet}”", detail, block=block, epoch=epoch, time_ns=time_ns, is_text=True)

    def _summary(self) -> str:
        summary = f"Searched the text of {plural(self._num_read, 'block')}"
        without_text = (
            f"; {count(self._num_without_text)} {'has' if self._num_without_text == 1 else 'have'} none"
            if self._num_without_text
            else ""
        )
        return f"{summary}{without_text}." + (f" {_HOW_NEXT}" if self._num_found > 1 else "")

    def _on_reply_timeout(self) -> None:
        if self._session.texts.is_reading:  # a long recording is being read for the first time
            self._reply_timer.start()
        else:
            self._stop("The engine does not answer text requests")

    def _stop(self, note: str) -> None:
        self._pending, self._remaining = [], iter(())
        self._typing_timer.stop()
        self._reply_timer.stop()
        if self._other_times is not None:
            self._other_times.cancel()
            self._other_times = None
        self._session.texts.request(self, ())
        self._set_note(note)

    def _set_note(self, note: str) -> None:
        if note != self.note:
            self.note = note
            self.changed.emit()


_HOW_NEXT: Final = "Enter: next, Shift+Enter: previous."
_MAX_DUPLICATES: Final = 256
"""Number of extra matches requested at other times, to make up for matches that are also in blocks at the time shown.
"""


def _is_shown(text: RecordedText, mirror: Mirror, shown_hashes: set[int]) -> bool:
    if text.hash:
        return int(text.hash, 16) in shown_hashes
    return text.block < mirror.num_rows and int(mirror.ledger.owner[text.block]) == text.owner


def blocks_in_order(mirror: Mirror) -> Iterator[tuple[int, int]]:
    """Yield (block, request) once for each block with text: tables of requests, newest first, then cached blocks with
    request 0.
    """
    seen: set[int] = set()
    requests, end = mirror.requests, mirror.num_rows if mirror.hello is None else mirror.hello.cache.first_state
    for row in np.flatnonzero(requests.num_blocks > 0)[::-1].tolist():
        number = int(requests.number[row])
        for block in requests.blocks(number, 0).tolist():
            if block not in seen:
                seen.add(block)
                yield block, number
    for block in np.flatnonzero(mirror.ledger.state[:end] == BlockState.CACHED)[:MAX_BLOCKS].tolist():
        if block not in seen:
            yield block, 0
