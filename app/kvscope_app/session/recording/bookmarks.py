"""Bookmarks of a session: stored ones, and those derived from the alarm rules.

Owns the current bookmarks, and the deleted ones for undo. `store` is a function that stores bookmarks: in the ring of a
live session, or in a sidecar file of a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace
from PySide6.QtCore import QObject, Signal

from kvscope_telemetry.summaries.bookmark import MAX_TEXT, Bookmark, in_order, new_bookmark, newest_revisions

StoreBookmarks = Callable[[list[Bookmark]], str]
"""Function that stores new bookmark revisions. Returns the error text, empty on success."""
MAX_UNDONE: Final = 100


class Bookmarks(QObject):
    """All bookmarks of a session. `shown` has them in the order of their times."""

    changed = Signal()
    deleted = Signal(list)
    """Emitted with the list of bookmarks that the user deleted."""
    failed = Signal(str)
    """Emitted with the reason why bookmarks could not be stored."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.shown: list[Bookmark] = []
        self.store: StoreBookmarks | None = None
        self._stored: dict[str, Bookmark] = {}
        self._derived: list[Bookmark] = []
        self._deleted: list[Bookmark] = []

    def add(self, time_ns: int, text: str = "") -> Bookmark:
        bookmark = new_bookmark(time_ns, text)
        self.add_revisions([bookmark])
        return bookmark

    def rename(self, bookmark: Bookmark, text: str) -> None:
        self._revise(bookmark, text=text.strip()[:MAX_TEXT])

    def delete(self, bookmarks: Iterable[Bookmark]) -> None:
        """Delete stored bookmarks and ignore derived ones. `undo` restores the last deleted bookmark, `restore` any of
        them.
        """
        to_delete = [
            each for each in bookmarks if self.is_stored(each) and not self._stored[each.bookmark_id].is_deleted
        ]
        self._deleted = [*self._deleted, *to_delete][-MAX_UNDONE:]
        for bookmark in to_delete:
            self._revise(bookmark, is_deleted=True)
        if to_delete:
            self.deleted.emit(to_delete)

    @property
    def can_undo(self) -> bool:
        return bool(self._deleted)

    def undo(self) -> Bookmark | None:
        """Restore the bookmark that was deleted last. Returns the bookmark, or None if there is none."""
        if not self._deleted:
            return None
        last_deleted = self._deleted[-1]
        self.restore([last_deleted])
        return self._stored[last_deleted.bookmark_id]

    def restore(self, deleted: list[Bookmark]) -> None:
        """Restore those of the given bookmarks that are still deleted."""
        ids = {bookmark.bookmark_id for bookmark in deleted}
        self._deleted = [bookmark for bookmark in self._deleted if bookmark.bookmark_id not in ids]
        for bookmark in deleted:
            if self._stored[bookmark.bookmark_id].is_deleted:
                self._revise(bookmark, is_deleted=False)

    def is_stored(self, bookmark: Bookmark) -> bool:
        """Whether the bookmark is stored and can be renamed and deleted, rather than derived from the alarm rules."""
        return bookmark.bookmark_id in self._stored

    def add_revisions(self, bookmarks: list[Bookmark]) -> None:
        """Add and store new bookmarks or revisions of bookmarks."""
        self._merge(bookmarks)
        failure = self.store(bookmarks) if self.store is not None else ""
        if failure:
            self.failed.emit(failure)

    def load(self, bookmarks: Iterable[Bookmark]) -> None:
        """Add bookmarks without storing them."""
        if stored := list(bookmarks):
            self._merge(stored)

    def set_derived(self, bookmarks: Iterable[Bookmark]) -> None:
        """Replace the bookmarks that the alarm rules derive from the overview. They are not stored."""
        self._derived = list(bookmarks)
        self._update_shown()

    def drop_before(self, time_ns: int) -> None:
        """Remove bookmarks that end before `time_ns`, where no history remains. Alarms that are still active stay."""
        dropped = [
            key
            for key, each in self._stored.items()
            if max(each.time_ns, each.until_ns) < time_ns and (each.is_user_note or each.until_ns)
        ]
        for key in dropped:
            del self._stored[key]
        if dropped:
            self._update_shown()

    def nearest(self, time_ns: int, *, forward: bool) -> Bookmark | None:
        """Return the first bookmark after `time_ns` if `forward`, else the last one before; None if there is none."""
        if forward:
            return next((each for each in self.shown if each.time_ns > time_ns), None)
        return next((each for each in reversed(self.shown) if each.time_ns < time_ns), None)

    def _revise(self, bookmark: Bookmark, *, text: str | None = None, is_deleted: bool = False) -> None:
        before = self._stored[bookmark.bookmark_id]
        text = before.text if text is None else text
        self.add_revisions([replace(before, revision=before.revision + 1, text=text, is_deleted=is_deleted)])

    def _merge(self, bookmarks: Iterable[Bookmark]) -> None:
        self._stored = newest_revisions([*self._stored.values(), *bookmarks])
        self._update_shown()

    def _update_shown(self) -> None:
        """Update `shown`. A stored alarm replaces a derived one of the same incident."""
        stored = list(self._stored.values())
        derived = [each for each in self._derived if not any(_is_same_incident(each, other) for other in stored)]
        shown = in_order([*stored, *derived])
        if shown != self.shown:
            self.shown = shown
            self.changed.emit()


def _is_same_incident(one: Bookmark, other: Bookmark) -> bool:
    """Whether both bookmarks are alarms of the same kind that overlap in time."""
    if one.kind != other.kind or one.is_user_note:
        return False
    return one.time_ns <= max(other.until_ns, other.time_ns) and other.time_ns <= max(one.until_ns, one.time_ns)
