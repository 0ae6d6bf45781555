"""The bookmarks of a session: those that were kept, and those that the alarm rules produce.

Owns what stands, and what deleting took away. Where they are kept is its keeper's: the ring of a live session, a file
beside the person's data for a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace
from PySide6.QtCore import QObject, Signal

from kvscope_telemetry.summaries.bookmark import MAX_TEXT, Bookmark, in_order, new_bookmark, settled

Keep = Callable[[list[Bookmark]], str]
"""Is given what was said of bookmarks; why that could not be kept, else empty."""
MAX_UNDONE: Final = 100


class Bookmarks(QObject):
    """`shown` is all there are, in the order of time."""

    changed = Signal()
    deleted = Signal(list)
    """Those that a person took away: `undo` brings them back."""
    failed = Signal(str)
    """Why what was said could not be kept."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.shown: list[Bookmark] = []
        self.keep: Keep | None = None
        self._said: dict[str, Bookmark] = {}
        self._derived: list[Bookmark] = []
        self._deleted: list[Bookmark] = []

    def add(self, time_ns: int, text: str = "") -> Bookmark:
        """Add a person's bookmark."""
        made = new_bookmark(time_ns, text)
        self.say([made])
        return made

    def rename(self, bookmark: Bookmark, text: str) -> None:
        """Give a bookmark another text."""
        self._say_anew(bookmark, text=text.strip()[:MAX_TEXT])

    def delete(self, bookmarks: Iterable[Bookmark]) -> None:
        """Delete some; each call of `undo` restores one deletion."""
        gone = [each for each in bookmarks if self.is_kept(each) and not self._said[each.bookmark_id].is_deleted]
        self._deleted = [*self._deleted, *gone][-MAX_UNDONE:]
        for bookmark in gone:
            self._say_anew(bookmark, is_deleted=True)
        if gone:
            self.deleted.emit(gone)

    @property
    def can_undo(self) -> bool:
        """Whether there is a deletion to undo."""
        return bool(self._deleted)

    def undo(self) -> Bookmark | None:
        """Restore what was deleted last."""
        if not self._deleted:
            return None
        back = self._deleted[-1]
        self.restore([back])
        return self._said[back.bookmark_id]

    def restore(self, deleted: list[Bookmark]) -> None:
        """Restore those of these that are not there."""
        ids = {bookmark.bookmark_id for bookmark in deleted}
        self._deleted = [bookmark for bookmark in self._deleted if bookmark.bookmark_id not in ids]
        for bookmark in deleted:
            if self._said[bookmark.bookmark_id].is_deleted:
                self._say_anew(bookmark, is_deleted=False)

    def is_kept(self, bookmark: Bookmark) -> bool:
        """Whether it is kept, and can be renamed and deleted; one that follows from the rules of alarms cannot."""
        return bookmark.bookmark_id in self._said

    def say(self, bookmarks: list[Bookmark]) -> None:
        """Add new bookmarks, and have them kept."""
        self._take(bookmarks)
        failure = self.keep(bookmarks) if self.keep is not None else ""
        if failure:
            self.failed.emit(failure)

    def load(self, bookmarks: Iterable[Bookmark]) -> None:
        """Take in what was kept before."""
        if said := list(bookmarks):
            self._take(said)

    def derive(self, bookmarks: Iterable[Bookmark]) -> None:
        """Those that follow from the session's overview by the rules of now; nothing of them is kept."""
        self._derived = list(bookmarks)
        self._show()

    def forget_before(self, time_ns: int) -> None:
        """There is nothing to go to before `time_ns` any more. What still rings stays, however old it is."""
        gone = [
            key
            for key, each in self._said.items()
            if max(each.time_ns, each.until_ns) < time_ns and (each.is_note or each.until_ns)
        ]
        for key in gone:
            del self._said[key]
        if gone:
            self._show()

    def nearest(self, time_ns: int, *, forward: bool) -> Bookmark | None:
        """The first after `time_ns`, or the last before."""
        if forward:
            return next((each for each in self.shown if each.time_ns > time_ns), None)
        return next((each for each in reversed(self.shown) if each.time_ns < time_ns), None)

    def _say_anew(self, bookmark: Bookmark, *, text: str | None = None, is_deleted: bool = False) -> None:
        before = self._said[bookmark.bookmark_id]
        text = before.text if text is None else text
        self.say([replace(before, revision=before.revision + 1, text=text, is_deleted=is_deleted)])

    def _take(self, bookmarks: Iterable[Bookmark]) -> None:
        self._said = settled([*self._said.values(), *bookmarks])
        self._show()

    def _show(self) -> None:
        """Of an alarm that was kept and follows from the rules of now as well, what was kept."""
        kept = list(self._said.values())
        derived = [each for each in self._derived if not any(_is_same(each, other) for other in kept)]
        shown = in_order([*kept, *derived])
        if shown != self.shown:
            self.shown = shown
            self.changed.emit()


def _is_same(one: Bookmark, other: Bookmark) -> bool:
    """Whether both are of one trouble: of one kind, and overlapping."""
    if one.kind != other.kind or one.is_note:
        return False
    return one.time_ns <= max(other.until_ns, other.time_ns) and other.time_ns <= max(one.until_ns, one.time_ns)
