"""Bookmarks and alarms that overlap an exported range: the newest revision of each, sorted by time."""

from __future__ import annotations

from collections.abc import Iterable

from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.bookmark import Bookmark, in_order, newest_revisions


def bookmarks_in(recording: Recording, span: Span, more: Iterable[Bookmark] = ()) -> list[Bookmark]:
    """Return the bookmarks and alarms that overlap `span`, from the recording and from `more`.

    `more` has bookmarks that were added after the recording was completed; they are stored in a file next to it.
    """
    standing = in_order(newest_revisions([*recording.bookmarks(), *more]).values())
    return [mark for mark in standing if mark.time_ns <= span.until_ns and end_of(mark) >= span.from_ns]


def end_of(mark: Bookmark) -> int:
    return max(mark.until_ns, mark.time_ns)


def name_of(mark: Bookmark) -> str:
    """Return the title of a bookmark: a user's text, or an alarm's name and worst value."""
    name = "" if mark.is_user_note else mark.kind
    return ": ".join(part for part in (name, mark.text) if part) or "Bookmark"
