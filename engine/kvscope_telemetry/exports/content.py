"""Input of an export: a range of a recording, whose requests and messages are read on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvscope_telemetry.exports.phase_spans import RequestHistory, read_request_histories
from kvscope_telemetry.exports.span import Span, timed_messages
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.session_overview import SessionOverview


@dataclass(frozen=True, slots=True)
class Content:
    """Range `span` of a recording, with its overview and bookmarks. `watch` receives the progress of reading."""

    recording: Recording
    overview: SessionOverview
    span: Span
    marks: Sequence[Bookmark] = ()
    watch: ProgressCallback | None = None

    def messages(self) -> Iterator[tuple[int, TelemetryMessage]]:
        return iter(timed_messages(self.recording, self.span, self.watch))

    def histories(self) -> list[RequestHistory]:
        return read_request_histories(self.messages(), self.overview.events)
