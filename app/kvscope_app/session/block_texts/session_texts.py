"""Block texts of a session at the shown time, from the engine or a recording.

Views say which blocks they need and are notified. The engine is asked for current contents, several blocks per question
and one question at a time. Other times, and sources without an engine, use recorded texts. Prompts are private, so a
recording has them only if the user agreed. Known texts are cached: a hash identifies a text for the lifetime of an
engine.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

from PySide6.QtCore import QObject, QTimer, Signal, SignalInstance

from kvscope_app.session.background import Background
from kvscope_app.session.timeline import Timeline
from kvscope_telemetry.block_texts.block_texts import BlockTextLookup
from kvscope_telemetry.messages.commands import BlockContent, BlockText, Command, Failed, GetBlockText, Reply
from kvscope_telemetry.mirror.mirror import Mirror

if TYPE_CHECKING:
    from kvscope_app.session.recording.recorded_texts import RecordedTexts

MAX_CACHED: Final = 16_384
MAX_BLOCKS_PER_REQUEST: Final = 128
"""Maximum number of blocks per question; the engine replies between steps."""
REQUEST_INTERVAL_MS: Final = 60
REPLY_TIMEOUT_MS: Final = 2000
_RETRY_S: Final = 2.0
"""Interval for retrying missing texts while the source or recording is still growing."""
_FIRST_TAG: Final = 1 << 40
"""Separates these tags from those of other requesters on the same socket."""

NOT_IN_RECORDING: Final = "This recording has no text. Record with text to include it."
NOT_REPORTED: Final = "The engine did not report this text."
BLOCK_NOT_RECORDED: Final = "This text was not recorded."
NOT_RECORDED: Final = "No text was recorded for this time. Record with text to include it."
FOR_OPERATORS: Final = "Text is for operators only: you are a viewer at this engine."
NO_ENGINE: Final = "Text is not available here."
Key = tuple[int, int, int, int]


def asked_of(mirror: Mirror, block: int) -> BlockTextLookup:
    """Return the identity of the content of `block`, 0 <= block < mirror.num_rows.

    A different value may mean other text.
    """
    ledger = mirror.ledger
    columns = (int(column[block]) for column in (ledger.owner, ledger.filled, ledger.hash))
    return BlockTextLookup(mirror.epoch or 0, block, *columns)


class SessionTexts(QObject):
    """Text cache of one session. Full blocks are keyed by their hash, others by block, owner and fill."""

    arrived = Signal()
    """Emitted when more texts are known, or known to be missing."""

    def __init__(self, session: TextSession, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._cache: OrderedDict[Key, BlockContent] = OrderedDict()
        self._filling: dict[tuple[int, int, int], BlockContent] = {}  # epoch, block, owner
        self._missing: dict[Key, float] = {}  # time of the last failed lookup
        self._wanted: dict[int, dict[Key, BlockTextLookup]] = {}  # by id() of the view
        self._requested: list[BlockTextLookup] = []
        self._tag = 0
        self._tags = itertools.count(_FIRST_TAG)
        self._lookup_keys: list[BlockTextLookup] = []
        self._failure = ""  # reason why the last lookup in the recording failed
        self._lookup: Background[list[BlockContent | None]] | None = None
        self._timer = QTimer(self, singleShot=True, interval=REQUEST_INTERVAL_MS)
        self._timer.timeout.connect(self.poll)
        self._reply_timer = QTimer(self, singleShot=True, interval=REPLY_TIMEOUT_MS)
        self._reply_timer.timeout.connect(self._on_reply_timeout)
        session.replies.connect(self._on_replies)

    def get(self, asked: BlockTextLookup) -> BlockContent | None:
        """Return the known content, or None. For a block that is being filled it may lack the newest tokens."""
        key = _key(asked)
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        before = None if asked.hash else self._filling.get((asked.epoch, asked.block, asked.owner))
        return before if before is not None and len(before.token_ids) <= asked.filled else None

    def request(self, view: object, wanted: Iterable[BlockTextLookup]) -> None:
        """Replace the blocks that view `view` needs. `arrived` is emitted when they are known."""
        unknown = {key: asked for asked in wanted if (key := _key(asked)) not in self._cache}
        self._wanted.pop(id(view), None)
        if unknown:
            self._wanted[id(view)] = unknown
            if not self._timer.isActive() and not self._requested:
                self._timer.start()

    def is_pending(self, asked: BlockTextLookup) -> bool:
        """Whether the text is unknown but can still arrive."""
        return _key(asked) not in self._cache and not self.why_not(asked)

    def why_not(self, asked: BlockTextLookup) -> str:
        """Return a sentence on why the text is missing, or "" if it is known or can still arrive."""
        key = _key(asked)
        if key in self._cache:
            return ""
        is_missing = self._is_missing(key)
        if self._is_live(asked):
            return NOT_REPORTED if is_missing else ""
        if self._recorded is None:
            return self.why_no_texts or NOT_RECORDED
        why_not_of_block = f"Texts cannot be read: {self._failure}" if self._failure else BLOCK_NOT_RECORDED
        return (self.why_no_texts or why_not_of_block) if is_missing else ""

    @property
    def is_reading(self) -> bool:
        return self._lookup is not None

    @property
    def why_no_texts(self) -> str:
        """Sentence on why there are no texts at the shown time, or "" if there may be some."""
        session = self._session
        recorded = self._recorded
        if session.mirror.hello is None or (recorded is not None and recorded.has_any is not False):
            return ""
        if session.timeline.is_file:
            return NOT_IN_RECORDING
        if session.is_viewer:
            return FOR_OPERATORS
        if not session.provides_texts:
            return NO_ENGINE
        return NOT_RECORDED if session.mirror.epoch != session.live_mirror.epoch else ""

    def containing(self, words: str) -> set[tuple[int, int]]:
        """Return (epoch, hash) of the cached full blocks whose text or notes (`LoRA sql`) contain `words`, ignoring
        case.
        """
        needle = words.casefold()
        return {(key[0], key[3]) for key, content in self._cache.items() if key[3] and _has(content, needle)}

    def poll(self) -> None:
        """Request the wanted texts. Called by the timer."""
        self._finish_lookup()
        wanted = {key: asked for each in self._wanted.values() for key, asked in each.items()}
        open_ = [asked for key, asked in wanted.items() if key not in self._cache and not self._is_missing(key)]
        live = [asked for asked in open_ if self._is_live(asked)]
        self._send_request(live[:MAX_BLOCKS_PER_REQUEST])
        recorded = self._recorded
        rest = [asked for asked in open_ if not self._is_live(asked)]
        if recorded is not None and rest and self._lookup is None:
            self._lookup_keys = rest
            self._lookup = recorded.look_up(rest, self._session.timeline.cursor_ns)
        if self._lookup is not None:
            self._timer.start()

    def close(self) -> None:
        self._timer.stop()
        self._reply_timer.stop()
        self._wanted.clear()
        if self._lookup is not None:
            self._lookup.cancel()

    @property
    def _recorded(self) -> RecordedTexts | None:
        return self._session.recorded_texts

    def _is_live(self, asked: BlockTextLookup) -> bool:
        """Whether the engine can be asked and its block still has the requested content.

        Away from the live end, the block may hold other text by now. At the live end, a block that is being filled may
        have more tokens than requested.
        """
        session, live = self._session, self._session.live_mirror
        if session.is_viewer or not session.provides_texts or live.epoch != asked.epoch or asked.block >= live.num_rows:
            return False
        now = asked_of(live, asked.block)
        if asked.hash:
            return now.hash == asked.hash
        is_at_end = live is session.mirror
        return now.owner == asked.owner and (now == asked or (is_at_end and now.filled >= asked.filled))

    def _send_request(self, wanted: list[BlockTextLookup]) -> None:
        if not wanted or self._requested:
            return
        tag = next(self._tags)
        if self._session.send(GetBlockText(blocks=tuple(asked.block for asked in wanted), tag=tag)):
            self._tag, self._requested = tag, wanted
            self._reply_timer.start()

    def _on_replies(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, BlockText | Failed) and self._requested and reply.tag == self._tag:
                self._store_reply(reply.contents if isinstance(reply, BlockText) else ())

    def _store_reply(self, contents: tuple[BlockContent, ...]) -> None:
        """Store the engine's reply, but only for blocks that still have the requested content."""
        asked, self._requested = self._requested, []
        self._reply_timer.stop()
        contents_of = dict(zip(asked, contents, strict=False))
        for each in asked:
            content = contents_of.get(each)
            is_available = content is not None and content.block == each.block and content.token_ids
            self._store(each, content if is_available and self._is_live(each) else None)
        self.arrived.emit()
        self.poll()

    def _on_reply_timeout(self) -> None:
        self._store_reply(())

    def _finish_lookup(self) -> None:
        if self._lookup is None or not self._lookup.is_finished:
            return
        found = self._lookup.result or [None] * len(self._lookup_keys)
        self._failure = self._lookup.failure
        self._lookup = None
        for asked, content in zip(self._lookup_keys, found, strict=True):
            self._store(asked, content)
        self.arrived.emit()

    def _store(self, asked: BlockTextLookup, content: BlockContent | None) -> None:
        key = _key(asked)
        if content is None:
            self._missing[key] = time.monotonic()
            if len(self._missing) > MAX_CACHED:
                del self._missing[next(iter(self._missing))]
            return
        self._missing.pop(key, None)
        self._cache[key] = content
        if not asked.hash:
            self._filling[asked.epoch, asked.block, asked.owner] = content
            if len(self._filling) > MAX_BLOCKS_PER_REQUEST:
                del self._filling[next(iter(self._filling))]
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)

    def _is_missing(self, key: Key) -> bool:
        since_s = self._missing.get(key)
        recorded = self._recorded
        may_come = not self._session.timeline.is_file or recorded is None or recorded.may_grow
        return since_s is not None and not (may_come and time.monotonic() - since_s > _RETRY_S)


def _key(asked: BlockTextLookup) -> Key:
    if asked.hash:
        return asked.epoch, -1, 0, asked.hash
    return asked.epoch, asked.block, (asked.owner << 32) + asked.filled, 0


class TextSession(Protocol):
    """The members of a session that texts use."""

    @property
    def replies(self) -> SignalInstance: ...

    @property
    def timeline(self) -> Timeline: ...
    @property
    def mirror(self) -> Mirror: ...
    @property
    def live_mirror(self) -> Mirror: ...
    @property
    def recorded_texts(self) -> RecordedTexts | None: ...
    @property
    def is_viewer(self) -> bool: ...
    @property
    def provides_texts(self) -> bool: ...
    def send(self, command: Command) -> bool: ...


def _has(content: BlockContent, needle: str) -> bool:
    notes = (f"{name} {value}" for name, value in content.notes)
    return any(needle in words.casefold() for words in (content.text, *notes))
