"""Alarms of a recording without a window: what each file says of an alarm that has not ended."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from kvscope_app.commands.recorded_alarms import RecordedAlarms
from kvscope_telemetry.alarms.rules import parse_rule
from kvscope_telemetry.summaries.bookmark import Bookmark, newest_revisions
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

START_NS = 1_700_000_000 * SECOND_NS


class FilesOfBookmarks:
    """A writer of recordings that keeps the bookmarks of each file and the summaries that a test adds."""

    engine = "kvscope"

    def __init__(self) -> None:
        self.overview: deque[Summary] = deque()
        self.paths: list[Path] = []
        self.bookmarks: list[list[Bookmark]] = []
        self.begin_file()

    def begin_file(self) -> None:
        self.paths.append(Path(f"x-{len(self.paths)}.mcap"))
        self.bookmarks.append([])

    def mark(self, bookmark: Bookmark) -> None:
        self.bookmarks[-1].append(bookmark)

    def texts(self) -> list[str]:
        """The text of the bookmark that each file has at last."""
        return [" ".join(each.text for each in newest_revisions(file).values()) for file in self.bookmarks]


def recorded(*loads: int | None) -> FilesOfBookmarks:
    """Files of a recording with so many running requests in each second; None: a new file begins."""
    writer: Any = FilesOfBookmarks()
    alarms = RecordedAlarms([parse_rule("Busy: running > 3 for 1 s")], "", writer, "ipc:///x", lambda line: None)
    second = 0
    for load in loads:
        if load is None:
            writer.begin_file()
            continue
        writer.overview.append(Summary(time_ns=START_NS + second * SECOND_NS, epoch=1, num_running=load))
        second += 1
        alarms.look()
    return writer


def test_an_alarm_that_has_not_ended_is_kept_with_its_worst_value() -> None:
    assert recorded(0, 5, 9, 7).texts() == ["up to 9 requests"]


def test_an_alarm_that_goes_on_as_it_is_is_written_once() -> None:
    assert len(recorded(0, 5, 5, 4, 5, 5).bookmarks[0]) == 1


def test_a_file_that_begins_during_an_alarm_has_its_bookmark() -> None:
    writer = recorded(0, 5, 6, None, 6, 8)
    assert writer.texts() == ["up to 6 requests", "up to 8 requests"]


def test_an_alarm_that_ended_says_until_when() -> None:
    (bookmark,) = newest_revisions(recorded(0, 5, 9, *[0] * 20).bookmarks[0]).values()
    assert bookmark.text == "up to 9 requests"
    assert bookmark.until_ns == START_NS + 3 * SECOND_NS
