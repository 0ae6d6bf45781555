"""The recordings of a person as windows see them: a list that changes, and what can be done to it. Nothing here waits.

Owns the librarian and who watches. Knows no widget; signals are emitted on the GUI thread.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.library.librarian import Librarian, LibraryStatus
from kvscope_app.library.store import LibraryStore

_LOOK_MS: Final = 80


class Library(QObject):
    """One for all windows of a desktop. It costs nothing until something is noted or watched."""

    changed = Signal()
    """`told` is another."""
    failed = Signal(str)
    """Something could not be done, in a line."""

    def __init__(self, folder: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.status = LibraryStatus(())
        self._librarian = Librarian(folder)
        self._num_watching = 0
        self._clock = QTimer(self, interval=_LOOK_MS)
        self._clock.timeout.connect(self._look)

    def watch(self) -> None:
        """Keep the list up to date, because somebody looks at it. Ends with `unwatch`."""
        self._num_watching += 1
        self._librarian.watch(True)
        self._clock.start()

    def unwatch(self) -> None:
        """Somebody stopped looking."""
        self._num_watching -= 1
        if not self._num_watching:
            self._clock.stop()
            self._librarian.watch(False)

    def note(self, path: Path | str) -> None:
        """List the recording at `path`, which kvscope wrote or opened."""
        noted = Path(path)
        self._librarian.do(lambda store: store.note(noted))

    def set_notes(self, path: str, notes: str) -> None:
        """A person's own words about it."""
        self._librarian.do(lambda store: store.set_notes(path, notes))

    def set_tags(self, path: str, tags: str) -> None:
        """A person's own tags."""
        self._librarian.do(lambda store: store.set_tags(path, tags))

    def remove(self, paths: list[str]) -> None:
        """Take these off the list; the files stay."""
        for path in paths:
            self._librarian.do(partial(LibraryStore.remove, path=path))

    def restore(self, paths: list[str]) -> None:
        """List again what was removed."""
        for path in paths:
            self._librarian.do(partial(LibraryStore.restore, path=path))

    def relocate(self, old: str, new: Path) -> None:
        """The recording listed at `old`, whose file is gone, is at `new`."""
        self._librarian.relocate(old, new)

    def close(self) -> None:
        """Finish the queued jobs, and end the thread."""
        self._clock.stop()
        self._librarian.close()

    def _look(self) -> None:
        while self._librarian.failures:
            self.failed.emit(self._librarian.failures.popleft())
        status = self._librarian.status
        if status is not None and status is not self.status:
            self.status = status
            self.changed.emit()
