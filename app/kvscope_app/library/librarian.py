"""The thread that keeps the list of recordings: it alone opens the list's database, reads recordings and looks at the
disk. No Qt.

Owns the thread, the order of its jobs, and the newest list. Only closing waits for it.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_app.library.entry import Entry
from kvscope_app.library.store import LibraryStore, stamp_of
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.recordings.read_budget import OpeningCancelled

Job = Callable[[LibraryStore], object]
LOOK_EVERY_S: Final = 1.0
"""How often it is looked for what others changed, while somebody watches."""
_TRIES: Final = 4
_TRY_AGAIN_S: Final = 0.2
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """The list as it is, and what a person must know of it."""

    entries: tuple[Entry, ...]
    trouble: str = ""
    is_looking: bool = False
    """Whether recordings are still to be looked into."""


class Librarian:
    """Begins with the first job. `told` is the newest list while `is_watched`; `failures` are jobs that could not be
    done, a line each."""

    def __init__(self, folder: Path) -> None:
        self.status: LibraryStatus | None = None
        self.failures: deque[str] = deque(maxlen=20)
        self._folder = folder
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._is_watched = False

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at the list."""
        return self._is_watched

    def watch(self, is_watched: bool) -> None:
        """Start or stop keeping the list up to date."""
        self._is_watched = is_watched
        self.do(lambda store: None)

    def do(self, job: Job) -> None:
        """Queue `job` behind those before it."""
        if self._is_closing.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvscope-library", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def relocate(self, old: str, new: Path) -> None:
        """The recording listed at `old`, whose file is gone, is at `new`."""
        self.do(lambda store: self._relocate(store, old, new))

    def close(self) -> None:
        """Finish the queued jobs, then end."""
        self._is_closing.set()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(_END_S)

    # The thread.

    def _run(self) -> None:
        store = LibraryStore(self._folder)
        wait_s: float | None = None
        while True:
            try:
                job = self._jobs.get(timeout=wait_s) if wait_s is None or wait_s > 0 else self._jobs.get_nowait()
            except queue.Empty:
                job = _nothing
            if job is None:
                break
            self._try(store, job)
            wait_s = self._look(store) if self._is_watched and self._jobs.empty() else None
        store.close()

    def _try(self, store: LibraryStore, job: Job) -> None:
        for attempt in range(_TRIES):
            try:
                job(store)
                return
            except (OSError, sqlite3.Error) as error:
                store.close()
                if attempt == _TRIES - 1 or "lock" not in str(error):
                    self.failures.append(f"The list of recordings was not changed: {error}")
                    return
                time.sleep(_TRY_AGAIN_S)
            except OpeningCancelled:
                return
            except KvscopeError as error:
                self.failures.append(str(error))
                return
            except Exception as error:  # the other jobs are done, and the list goes on being kept
                self.failures.append(f"The list of recordings was not changed: {error!r:.200}")
                return

    def _look(self, store: LibraryStore) -> float:
        """Bring the list up to date, and look into one recording; seconds until there is more to do."""
        try:
            entries = store.entries()
            pending = [entry for entry in entries if _is_new(entry)]
            status = LibraryStatus(tuple(entries), store.trouble, bool(pending))
            if status != self.status:
                self.status = status
            if not pending:
                return LOOK_EVERY_S
            self._look_into(store, pending[0], entries)
            return 0.0
        except (OSError, sqlite3.Error):  # busy, or gone: opened again
            store.close()
        except Exception as error:  # whatever it is, it is looked again, and whoever looks is not left waiting
            known = self.status.entries if self.status is not None else ()
            self.status = LibraryStatus(known, f"The list of recordings cannot be read: {error!r:.200}")
        return LOOK_EVERY_S

    def _look_into(self, store: LibraryStore, entry: Entry, entries: list[Entry]) -> None:
        from kvscope_app.library.file_facts import look_into  # most sessions need none of it

        stamp = stamp_of(entry.open_path)
        try:
            facts, picture = look_into(entry.open_path, self._goes_on)
        except OpeningCancelled:
            return
        except Exception as error:  # whatever is wrong with one file, the others are looked into
            store.keep_problem(entry.path, str(error) or type(error).__name__, stamp)
            return
        store.keep_facts(entry.path, facts, stamp, picture)
        moved = next((each for each in entries if each.is_missing and facts.is_same_recording(each.facts)), None)
        if moved is not None:
            with contextlib.suppress(BadInput):  # it has words of its own: both stay
                store.move(moved.path, entry.path)

    def _relocate(self, store: LibraryStore, old: str, new: Path) -> None:
        from kvscope_app.library.file_facts import look_into

        facts, picture = look_into(str(new), self._goes_on)
        entry = store.entry(old)
        if entry is not None and entry.facts.is_known and not facts.is_same_recording(entry.facts):
            raise BadInput(f"{new.name!r} is not the missing recording {entry.name!r}")
        stamp = stamp_of(str(new))
        store.move(old, str(new))
        store.keep_facts(str(new), facts, stamp, picture)

    def _goes_on(self, share: float) -> bool:
        return not self._is_closing.is_set()


def _nothing(store: LibraryStore) -> None:
    """Time went by."""


def _is_new(entry: Entry) -> bool:
    """Whether it has to be looked into: once it is whole, or for the first time."""
    if entry.is_missing or (entry.is_part and entry.stamp):
        return False
    try:
        return entry.stamp != stamp_of(entry.open_path)
    except OSError:
        return False
