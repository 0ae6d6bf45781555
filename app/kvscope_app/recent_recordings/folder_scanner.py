"""Lists the recordings of a folder and reads their headers, on its own thread. Imports no Qt.

See docs/internals/decisions/0008-recordings-are-listed-from-their-folder.md.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from typing import Final

from kvscope_app.ui.model_name import model_name
from kvscope_telemetry.collectors.external_engines import engine_name
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.telemetry import Hello
from kvscope_telemetry.recordings.layout import PART_SUFFIX, SUFFIX
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording

MAX_LISTED: Final = 2_000
"""Maximum number of listed files; older ones are left out."""
SCAN_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """Facts about a recording that are read from its chunk headers and its first message."""

    model: str
    engine: str
    start_ns: int
    """Wall-clock time of the first message, in nanoseconds since 1970."""
    length_s: float
    has_texts: bool


@dataclass(frozen=True, slots=True)
class ListedRecording:
    path: str
    num_bytes: int
    modified_ns: int
    header: RecordingHeader | None = None
    """Header of the recording; None if it was not read yet or cannot be read."""
    problem: str = ""
    """Reason why the file cannot be read, in one line; empty if it can be read."""

    @property
    def name(self) -> str:
        """File name without the folder and without `PART_SUFFIX`."""
        return self.path.rpartition("/")[2].removesuffix(PART_SUFFIX)

    @property
    def is_part(self) -> bool:
        """Whether the file is still being written or was truncated."""
        return self.path.endswith(PART_SUFFIX)

    @property
    def is_pending(self) -> bool:
        return self.header is None and not self.problem

    @property
    def search_text(self) -> str:
        header = self.header
        return " ".join((self.name, *((header.model, header.engine) if header else ()))).casefold()


@dataclass(frozen=True, slots=True)
class FolderListing:
    recordings: tuple[ListedRecording, ...] = ()
    num_left_out: int = 0
    """Number of older recordings that are not listed because the folder has more than `MAX_LISTED`."""
    problem: str = ""
    """Reason why the folder cannot be read; empty if it can be read."""
    is_reading: bool = True
    """Whether the headers of some recordings are not read yet."""


class FolderScanner:
    """Scans `folder` periodically until it is closed. `listing` is replaced whenever its contents have changed."""

    def __init__(self, folder: str) -> None:
        self.listing = FolderListing()
        self._folder = folder
        self._known_headers: dict[str, ListedRecording] = {}
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="kvscope-recordings", daemon=True).start()

    def close(self) -> None:
        """End the thread without waiting for it, as the disk may not respond."""
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            next_scan_s = time.monotonic() + SCAN_EVERY_S
            self._scan()
            pending = [recording for recording in self._known_headers.values() if recording.is_pending]
            for recording in sorted(pending, key=lambda each: -each.modified_ns):
                if self._is_closed.is_set() or time.monotonic() > next_scan_s:
                    break
                self._known_headers[recording.path] = _with_header(recording, self._may_continue)
                self._publish(replace(self.listing, recordings=tuple(self._known_headers.values())))
            self._is_closed.wait(next_scan_s - time.monotonic())

    def _scan(self) -> None:
        try:
            recordings = _recordings_in(self._folder)
        except OSError as error:
            self._known_headers = {}
            self._publish(FolderListing(problem=error.strerror or str(error)))
            return
        listed = sorted(sorted(recordings, key=lambda each: -each.modified_ns)[:MAX_LISTED], key=lambda each: each.path)
        known_headers = self._known_headers
        self._known_headers = {each.path: _with_known_header(each, known_headers.get(each.path)) for each in listed}
        self._publish(FolderListing(tuple(self._known_headers.values()), len(recordings) - len(listed)))

    def _publish(self, listing: FolderListing) -> None:
        listing = replace(listing, is_reading=any(each.is_pending for each in listing.recordings))
        if listing != self.listing:
            self.listing = listing

    def _may_continue(self, _share: float) -> bool:
        return not self._is_closed.is_set()


def _recordings_in(folder: str) -> list[ListedRecording]:
    recordings = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((SUFFIX, SUFFIX + PART_SUFFIX)):
                try:
                    is_file, status = entry.is_file(), entry.stat()
                except OSError:  # deleted since the folder was read
                    continue
                if is_file:
                    recordings.append(ListedRecording(entry.path, status.st_size, status.st_mtime_ns))
    return recordings


def _with_known_header(recording: ListedRecording, previous: ListedRecording | None) -> ListedRecording:
    """Return `recording` with the header of `previous`, its earlier state, unless the file has changed since.

    A file that is being written keeps its first header, because rereading it gets slower as the file grows.
    """
    if previous is None:
        return recording
    is_header_kept = recording.is_part and previous.header is not None
    if previous.modified_ns != recording.modified_ns and not is_header_kept:
        return recording
    return replace(recording, header=previous.header, problem=previous.problem)


def _with_header(recording: ListedRecording, report_progress: ProgressCallback) -> ListedRecording:
    try:
        opened = Recording.open(recording.path, report_progress)
    except OpeningCancelled:
        return recording
    except (KvscopeError, OSError) as error:
        return replace(recording, problem=str(error))
    except Exception as error:  # a broken file must not keep the others from being read
        return replace(recording, problem=f"{type(error).__name__}: {error}")
    hello = opened.info.hello
    header = RecordingHeader(
        model=model_name(hello),
        engine=_engine_text(hello),
        start_ns=opened.start_ns,
        length_s=opened.info.duration_s,
        has_texts=opened.has_texts,
    )
    return replace(recording, header=header)


def _engine_text(hello: Hello) -> str:
    """Return the engine's name and version, such as `vLLM 0.32.0`. If the version begins with the name, return
    the version.
    """
    name, version = engine_name(hello.capabilities.engine), hello.engine_version
    return version if version.casefold().startswith(name.casefold()) else f"{name} {version}".strip()
