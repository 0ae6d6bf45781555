"""A bookmark: a moment of a session that somebody marked, or an alarm did.

Owns what is in it and how it lies in a recording (JSON, with a schema). What was said of one is never changed: what is
said later has the same `bookmark_id` and a higher `revision`, and stands.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

import msgspec

from kvscope_telemetry.errors import ProtocolError

NOTE: Final = "note"
"""The kind of one that a person made; those of alarms are called as their rules."""
MAX_TEXT: Final = 500
MAX_BOOKMARK_BYTES: Final = 16 << 10
MAX_BOOKMARKS: Final = 10_000
"""So many at most are read of a file: the newest."""


class Bookmark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """At `time_ns`, and until `until_ns` where it is about a while. Times are the recording's: ns since 1970."""

    bookmark_id: str
    time_ns: int
    until_ns: int = 0
    """0: a moment."""
    kind: str = NOTE
    text: str = ""
    revision: int = 0
    is_deleted: bool = False

    @property
    def is_note(self) -> bool:
        """Whether a person made it."""
        return self.kind == NOTE


_decoder: Final = msgspec.json.Decoder(Bookmark)
_many: Final = msgspec.json.Decoder(list[Bookmark])


def new_bookmark(time_ns: int, text: str = "", kind: str = NOTE, until_ns: int = 0) -> Bookmark:
    """One that was not there before."""
    return Bookmark(
        bookmark_id=secrets.token_hex(8), time_ns=time_ns, until_ns=until_ns, kind=kind, text=text[:MAX_TEXT]
    )


def settled(said: Iterable[Bookmark]) -> dict[str, Bookmark]:
    """By id, what stands of all that was said, deleted ones included."""
    found: dict[str, Bookmark] = {}
    for bookmark in said:
        before = found.get(bookmark.bookmark_id)
        if before is None or bookmark.revision >= before.revision:
            found[bookmark.bookmark_id] = bookmark
    return found


def in_order(bookmarks: Iterable[Bookmark]) -> list[Bookmark]:
    """Those that are not deleted, in the order of time."""
    return sorted((b for b in bookmarks if not b.is_deleted), key=lambda b: (b.time_ns, b.bookmark_id))


def encode_bookmark(bookmark: Bookmark) -> bytes:
    """As JSON."""
    return msgspec.json.encode(bookmark)


def decode_bookmark(data: bytes) -> Bookmark:
    """Raises ProtocolError for what is none."""
    if len(data) > MAX_BOOKMARK_BYTES:
        raise ProtocolError(f"a bookmark of {len(data)} bytes: at most {MAX_BOOKMARK_BYTES} are accepted")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"a bookmark that cannot be read: {error}") from None


def encode_bookmarks(bookmarks: Iterable[Bookmark]) -> str:
    """Several, one a line, as a JSON array."""
    lines = ",\n".join(encode_bookmark(bookmark).decode() for bookmark in bookmarks)
    return f"[\n{lines}\n]\n"


def decode_bookmarks(text: str) -> list[Bookmark]:
    """Raises ProtocolError for what are none."""
    try:
        return _many.decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"bookmarks that cannot be read: {error}") from None
