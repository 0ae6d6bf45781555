"""Bookmarks: moments or time ranges of a session that a user or an alarm marked.

Defines their contents and their encoding in a recording (JSON, with a schema). A stored revision is never changed: a
later one has the same `bookmark_id` and a higher `revision`, and replaces it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

import msgspec

from kvscope_telemetry.errors import ProtocolError

NOTE: Final = "note"
"""Kind of a bookmark that a user created. The kind of an alarm's bookmark is the name of the alarm's rule."""
MAX_TEXT: Final = 500
MAX_BOOKMARK_BYTES: Final = 16 << 10
MAX_BOOKMARKS: Final = 10_000
"""Maximum number of revisions read from a file. The newest are retained."""


class Bookmark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One revision of a bookmark. `time_ns` and `until_ns` are in ns since 1970 on the recording's clock."""

    bookmark_id: str
    time_ns: int
    until_ns: int = 0
    """End of the time range; 0 if the bookmark is a single moment."""
    kind: str = NOTE
    text: str = ""
    revision: int = 0
    is_deleted: bool = False

    @property
    def is_user_note(self) -> bool:
        return self.kind == NOTE


_decoder: Final = msgspec.json.Decoder(Bookmark)
_list_decoder: Final = msgspec.json.Decoder(list[Bookmark])


def new_bookmark(time_ns: int, text: str = "", kind: str = NOTE, until_ns: int = 0) -> Bookmark:
    """Return a bookmark with a new random id. `text` is truncated to `MAX_TEXT` characters."""
    return Bookmark(
        bookmark_id=secrets.token_hex(8), time_ns=time_ns, until_ns=until_ns, kind=kind, text=text[:MAX_TEXT]
    )


def newest_revisions(revisions: Iterable[Bookmark]) -> dict[str, Bookmark]:
    """Return the newest revision of each bookmark by id, including deleted ones."""
    newest: dict[str, Bookmark] = {}
    for bookmark in revisions:
        known = newest.get(bookmark.bookmark_id)
        if known is None or bookmark.revision >= known.revision:
            newest[bookmark.bookmark_id] = bookmark
    return newest


def in_order(bookmarks: Iterable[Bookmark]) -> list[Bookmark]:
    """Return the bookmarks that are not deleted, sorted by time."""
    return sorted((b for b in bookmarks if not b.is_deleted), key=lambda b: (b.time_ns, b.bookmark_id))


def encode_bookmark(bookmark: Bookmark) -> bytes:
    return msgspec.json.encode(bookmark)


def decode_bookmark(data: bytes) -> Bookmark:
    if len(data) > MAX_BOOKMARK_BYTES:
        raise ProtocolError(f"a bookmark of {len(data)} bytes: at most {MAX_BOOKMARK_BYTES} are accepted")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"a bookmark that cannot be read: {error}") from None


def encode_bookmarks(bookmarks: Iterable[Bookmark]) -> str:
    """Encode bookmarks as a JSON array, one per line."""
    lines = ",\n".join(encode_bookmark(bookmark).decode() for bookmark in bookmarks)
    return f"[\n{lines}\n]\n"


def decode_bookmarks(text: str) -> list[Bookmark]:
    try:
        return _list_decoder.decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"bookmarks that cannot be read: {error}") from None
