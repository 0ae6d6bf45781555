"""Alarms of a recording made without a window: written to the file, printed, and posted to a webhook.

Owns an overview of the last minutes, built from the writer's summaries. Runs on the thread that records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvscope_app.commands.segmented_writer import SegmentedWriter
from kvscope_telemetry.alarms.alarm_engine import Alarm, AlarmEngine, alarm_text, bookmark_of
from kvscope_telemetry.alarms.expression import MAX_WINDOW_S
from kvscope_telemetry.alarms.rules import Rule, rule_text
from kvscope_telemetry.alarms.webhook import Webhook, payload
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

_RETAINED_NS: Final = 2 * MAX_WINDOW_S * SECOND_NS
_CLOSE_TIMEOUT_S: Final = 6.0
"""Maximum seconds to wait for the last webhook posts when the recording ends."""


class RecordedAlarms:
    """Evaluates alarm rules on the summaries of `writer`. `instance` is the engine's address; `report` prints
    a line.
    """

    def __init__(
        self, rules: Sequence[Rule], url: str, writer: SegmentedWriter, instance: str, report: Callable[[str], None]
    ) -> None:
        self._engine = AlarmEngine(rules)
        self._webhook = Webhook(url) if url else None
        self._writer, self._instance, self._report_line = writer, instance, report
        self._overview = SessionOverview()
        self._evaluated_ns = -1
        self._num_files = 0
        self._written_bookmarks: dict[str, Bookmark] = {}
        """Bookmarks of ongoing alarms as last written to the current file, by bookmark id."""
        self._has_failed = False

    def poll(self) -> None:
        """Evaluate the seconds that are complete, and report alarms that have started or ended."""
        overview = self._writer.overview
        while overview:
            item = overview.popleft()
            if isinstance(item, Summary):
                self._overview.extend([item])
        first, last = self._overview.index_at(self._evaluated_ns) + 1, len(self._overview)
        if first < last:
            for alarm in self._engine.read(self._overview, first, last):
                self._report(alarm)
            self._write_ongoing()
            self._evaluated_ns = int(self._overview.time_ns[last - 1])
            self._overview.forget_before(self._evaluated_ns - _RETAINED_NS)
        self._report_failure()

    def close(self) -> None:
        """Post the pending alarms, waiting at most `_CLOSE_TIMEOUT_S`, and close the webhook."""
        if self._webhook is not None:
            self._webhook.close(_CLOSE_TIMEOUT_S)
            self._report_failure()

    def _write_ongoing(self) -> None:
        """Write ongoing alarms whose worst value changed; at the start of a file, write all of them.

        They are written early because the recording may end before these alarms do.
        """
        if len(self._writer.paths) != self._num_files:
            self._num_files = len(self._writer.paths)
            self._written_bookmarks.clear()
        ongoing = {bookmark.bookmark_id: bookmark for bookmark in map(bookmark_of, self._engine.active)}
        for key, bookmark in ongoing.items():
            if self._written_bookmarks.get(key) != bookmark:
                self._writer.write_bookmark(bookmark)
        self._written_bookmarks = ongoing

    def _report(self, alarm: Alarm) -> None:
        if alarm.until_ns:
            self._writer.write_bookmark(bookmark_of(alarm))
        event = f"{alarm.name} ended" if alarm.until_ns else rule_text(alarm.rule)
        details = alarm_text(alarm)
        self._report_line(f"alarm: {event}" + (f" ({details})" if details else ""))
        if self._webhook is not None:
            self._webhook.post(payload(alarm, self._writer.engine, self._instance))

    def _report_failure(self) -> None:
        """Print that an alarm could not be posted, unless the previous post failed too."""
        failure = "" if self._webhook is None else self._webhook.failure
        if failure and not self._has_failed:
            self._report_line(f"alarm not posted: {failure}")
        self._has_failed = bool(failure)
