"""Tests of alarms in recordings without a window: the bookmarks in each file of a segmented recording."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from kvscope_app.commands.recorded_alarms import RecordedAlarms
from kvscope_telemetry.alarms.rules import parse_rule
from kvscope_telemetry.summaries.bookmark import Bookmark, newest_revisions
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

START_NS = 1_700_000_000 * SECOND_NS


class BookmarkFilesWriter:
    """Recording writer that stores the bookmarks of each file and the summaries added by a test."""

    engine = "kvscope"

    def __init__(self) -> None:
        self.overview: deque[Summary] = deque()
        self.paths: list[Path] = []
        self.bookmarks: list[list[Bookmark]] = []
        self.begin_file()

    def begin_file(self) -> None:
        self.paths.append(Path(f"x-{len(self.paths)}.mcap"))
        self.bookmarks.append([])

    def write_bookmark(self, bookmark: Bookmark) -> None:
        self.bookmarks[-1].append(bookmark)

    def texts(self) -> list[str]:
        """Return the final bookmark text of each file."""
        return [" ".join(each.text for each in newest_revisions(file).values()) for file in self.bookmarks]


def record_loads(*loads: int | None) -> BookmarkFilesWriter:
    """Record one second for each number of running requests; None begins a new file."""
    writer: Any = BookmarkFilesWriter()
    alarms = RecordedAlarms([parse_rule("Busy: running > 3 for 1 s")], "", writer, "ipc:///x", lambda line: None)
    second = 0
    for load in loads:
        if load is None:
            writer.begin_file()
            continue
        writer.overview.append(Summary(time_ns=START_NS + second * SECOND_NS, epoch=1, num_running=load))
        second += 1
        alarms.poll()
    return writer


def test_ongoing_alarm_is_recorded_with_its_worst_value() -> None:
    assert record_loads(0, 5, 9, 7).texts() == ["up to 9 requests"]


def test_ongoing_alarm_with_unchanged_worst_value_is_written_once() -> None:
    assert len(record_loads(0, 5, 5, 4, 5, 5).bookmarks[0]) == 1


def test_file_that_begins_during_an_alarm_contains_its_bookmark() -> None:
    writer = record_loads(0, 5, 6, None, 6, 8)
    assert writer.texts() == ["up to 6 requests", "up to 8 requests"]


def test_ended_alarm_has_an_end_time() -> None:
    (bookmark,) = newest_revisions(record_loads(0, 5, 9, *[0] * 20).bookmarks[0]).values()
    assert bookmark.text == "up to 9 requests"
    assert bookmark.until_ns == START_NS + 3 * SECOND_NS
