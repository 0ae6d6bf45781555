"""Block texts of a session at the shown time, from the engine or a recording.

Views request the blocks they need and are notified by a signal. Current contents are requested from the engine, several
blocks per message and one message at a time. Texts of other times, and of sources without an engine, are read from the
recording. Prompts are private, so a recording has them only if the user agreed. Known texts are cached: a hash
identifies a text for the lifetime of an engine.
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
"""Maximum number of blocks per request to the engine, which replies between steps."""
REQUEST_INTERVAL_MS: Final = 60
REPLY_TIMEOUT_MS: Final = 2000
_RETRY_S: Final = 2.0
"""Seconds until a missing text is requested again, while the source or recording still grows."""
_FIRST_TAG: Final = 1 << 40
"""Lowest tag of text requests. Other senders on the same socket use lower tags or a higher range."""

NOT_IN_RECORDING: Final = "This recording has no text. Record with text to include it."
NOT_REPORTED: Final = "The engine did not report this text."
BLOCK_NOT_RECORDED: Final = "This text was not recorded."
NOT_RECORDED: Final = "No text was recorded for this time. Record with text to include it."
FOR_OPERATORS: Final = "Text is for operators only: you are a viewer at this engine."
NO_ENGINE: Final = "Text is not available here."
Key = tuple[int, int, int, int]


def lookup_of(mirror: Mirror, block: int) -> BlockTextLookup:
    """Return a key of the text in `block`, 0 <= block < mirror.num_rows. Equal keys mean equal text."""
    ledger = mirror.ledger
    columns = (int(column[block]) for column in (ledger.owner, ledger.filled, ledger.hash))
    return BlockTextLookup(mirror.epoch or 0, block, *columns)


class SessionTexts(QObject):
    """Cache of one session's block texts.

    Full blocks are keyed by their hash, others by block, owner and number of filled slots.
    """

    arrived = Signal()
    """Emitted when more texts are known, or are known to be missing."""

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

    def get(self, lookup: BlockTextLookup) -> BlockContent | None:
        """Return the known content, or None. The content of a block that is being filled may lack the newest tokens."""
        key = _key(lookup)
        content = self._cache.get(key)
        if content is not None:
            self._cache.move_to_end(key)
            return content
        partial = None if lookup.hash else self._filling.get((lookup.epoch, lookup.block, lookup.owner))
        return partial if partial is not None and len(partial.token_ids) <= lookup.filled else None

    def request(self, view: object, wanted: Iterable[BlockTextLookup]) -> None:
        """Replace the set of blocks that `view` needs. `arrived` is emitted when their texts are known."""
        unknown = {key: lookup for lookup in wanted if (key := _key(lookup)) not in self._cache}
        self._wanted.pop(id(view), None)
        if unknown:
            self._wanted[id(view)] = unknown
            if not self._timer.isActive() and not self._requested:
                self._timer.start()

    def is_pending(self, lookup: BlockTextLookup) -> bool:
        """Whether the text is unknown but can still arrive."""
        return _key(lookup) not in self._cache and not self.why_not(lookup)

    def why_not(self, lookup: BlockTextLookup) -> str:
        """Return a sentence on why the block's text is missing, or "" if the text is known or can still arrive."""
        key = _key(lookup)
        if key in self._cache:
            return ""
        is_missing = self._is_missing(key)
        if self._is_live(lookup):
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

    def containing(self, text: str) -> set[tuple[int, int]]:
        """Return (epoch, hash) of the full blocks with a known text that contain `text` in their text or notes,
        ignoring case.

        A note is for example `LoRA sql`.
        """
        needle = text.casefold()
        return {(key[0], key[3]) for key, content in self._cache.items() if key[3] and _contains_text(content, needle)}

    def poll(self) -> None:
        self._finish_lookup()
        wanted = {key: lookup for view_wanted in self._wanted.values() for key, lookup in view_wanted.items()}
        unresolved = [lookup for key, lookup in wanted.items() if key not in self._cache and not self._is_missing(key)]
        live = [lookup for lookup in unresolved if self._is_live(lookup)]
        self._send_request(live[:MAX_BLOCKS_PER_REQUEST])
        recorded = self._recorded
        recorded_lookups = [lookup for lookup in unresolved if not self._is_live(lookup)]
        if recorded is not None and recorded_lookups and self._lookup is None:
            self._lookup_keys = recorded_lookups
            self._lookup = recorded.look_up(recorded_lookups, self._session.timeline.cursor_ns)
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

    def _is_live(self, lookup: BlockTextLookup) -> bool:
        """Whether the engine accepts text requests and its block still has the requested content.

        Away from the live end, the block may have other text by now. At the live end, a block that is being filled may
        have more tokens than requested.
        """
        session, live = self._session, self._session.live_mirror
        if (
            session.is_viewer
            or not session.provides_texts
            or live.epoch != lookup.epoch
            or lookup.block >= live.num_rows
        ):
            return False
        current = lookup_of(live, lookup.block)
        if lookup.hash:
            return current.hash == lookup.hash
        is_at_end = live is session.mirror
        return current.owner == lookup.owner and (current == lookup or (is_at_end and current.filled >= lookup.filled))

    def _send_request(self, wanted: list[BlockTextLookup]) -> None:
        if not wanted or self._requested:
            return
        tag = next(self._tags)
        if self._session.send(GetBlockText(blocks=tuple(lookup.block for lookup in wanted), tag=tag)):
            self._tag, self._requested = tag, wanted
            self._reply_timer.start()

    def _on_replies(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, BlockText | Failed) and self._requested and reply.tag == self._tag:
                self._store_reply(reply.contents if isinstance(reply, BlockText) else ())

    def _store_reply(self, contents: tuple[BlockContent, ...]) -> None:
        """Store the engine's reply, but only for blocks that still have the requested content."""
        lookups, self._requested = self._requested, []
        self._reply_timer.stop()
        content_by_lookup = dict(zip(lookups, contents, strict=False))
        for block_lookup in lookups:
            content = content_by_lookup.get(block_lookup)
            is_available = content is not None and content.block == block_lookup.block and content.token_ids
            self._store(block_lookup, content if is_available and self._is_live(block_lookup) else None)
        self.arrived.emit()
        self.poll()

    def _on_reply_timeout(self) -> None:
        self._store_reply(())

    def _finish_lookup(self) -> None:
        if self._lookup is None or not self._lookup.is_finished:
            return
        contents = self._lookup.result or [None] * len(self._lookup_keys)
        self._failure = self._lookup.failure
        self._lookup = None
        for lookup, content in zip(self._lookup_keys, contents, strict=True):
            self._store(lookup, content)
        self.arrived.emit()

    def _store(self, lookup: BlockTextLookup, content: BlockContent | None) -> None:
        key = _key(lookup)
        if content is None:
            self._missing[key] = time.monotonic()
            if len(self._missing) > MAX_CACHED:
                del self._missing[next(iter(self._missing))]
            return
        self._missing.pop(key, None)
        self._cache[key] = content
        if not lookup.hash:
            self._filling[lookup.epoch, lookup.block, lookup.owner] = content
            if len(self._filling) > MAX_BLOCKS_PER_REQUEST:
                del self._filling[next(iter(self._filling))]
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)

    def _is_missing(self, key: Key) -> bool:
        since_s = self._missing.get(key)
        recorded = self._recorded
        may_arrive = not self._session.timeline.is_file or recorded is None or recorded.may_grow
        return since_s is not None and not (may_arrive and time.monotonic() - since_s > _RETRY_S)


def _key(lookup: BlockTextLookup) -> Key:
    if lookup.hash:
        return lookup.epoch, -1, 0, lookup.hash
    return lookup.epoch, lookup.block, (lookup.owner << 32) + lookup.filled, 0


class TextSession(Protocol):
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


def _contains_text(content: BlockContent, needle: str) -> bool:
    notes = (f"{name} {value}" for name, value in content.notes)
    return any(needle in text.casefold() for text in (content.text, *notes))
