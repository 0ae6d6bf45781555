"""`kvscope record`: writes any engine's telemetry to a file, without a window.

Decides when the recording ends, and prints its progress. The writer owns the file.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvscope_app.access_options import add_access_options, parse_addresses
from kvscope_app.alarm_options import add_alarm_options, alarm_rules, alarm_webhook
from kvscope_app.option_values import parse_duration, parse_size
from kvscope_telemetry.addresses import accepted_addresses
from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.block_texts.text_collector import TextCollector
from kvscope_telemetry.errors import BadInput, EngineDead, KvscopeError
from kvscope_telemetry.messages.commands import BlockText, GetBlockText
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.termination import handling_signals

if TYPE_CHECKING:
    from kvscope_app.commands.recorded_alarms import RecordedAlarms
    from kvscope_app.commands.segmented_writer import SegmentedWriter
    from kvscope_telemetry.addresses import WatchedSource

REQUEST_INTERVAL_S: Final = 0.5
MAX_BLOCKS_PER_REQUEST: Final = 512
_CONNECT_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.1
REPORT_INTERVAL_S: Final = 1.0
REFUSED_S: Final = 3.0
"""Seconds after which the recording ends if the engine refuses the connection. Waiting longer rarely helps."""
_ABSENT: Final = (SourceState.CONNECTING, SourceState.STALE, SourceState.ENDED)


def add_record_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "record",
        help="record an engine to a file, without a window",
        description="Record an engine's telemetry until the time is up or Ctrl-C is pressed. The file is complete"
        " in both cases; during the recording its name is FILE.mcap.part.",
        allow_abbrev=False,
    )
    parser.add_argument("endpoint", metavar="ADDRESS", help=accepted_addresses())
    parser.add_argument("--out", metavar="FILE.mcap", type=Path, required=True, help="file to write; must not exist")
    parser.add_argument(
        "--seconds",
        metavar="N",
        type=parse_duration,
        help="stop after N seconds, including the time to connect (default: until Ctrl-C)",
    )
    parser.add_argument(
        "--record-text",
        action="store_true",
        help="include the text of blocks, so that the file contains prompts and answers (requires an operator's key)",
    )
    add_access_options(parser, "ADDRESS")
    add_alarm_options(
        parser, "'default' stands for the predefined alarms, also used if --alarm-webhook is given without --alarm"
    )
    parser.add_argument(
        "--wait",
        metavar="N",
        type=parse_duration,
        default=60.0,
        help="stop after N seconds without an answer from the engine (default: 60)",
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--segment-seconds", metavar="N", type=parse_duration, help="start a new file every N seconds: FILE-001.mcap, …"
    )
    parts.add_argument(
        "--segment-bytes", metavar="SIZE", type=parse_size, help="start a new file after SIZE, such as 100MB or 1GiB"
    )
    parser.set_defaults(run=record)
    return parser


def record(args: argparse.Namespace) -> int:
    """Record and return the exit code: 1 if the recording ended early because the engine was absent, else 0."""
    from kvscope_app.commands.segmented_writer import SegmentedWriter

    started_s = time.monotonic()
    (address,) = parse_addresses(args, [args.endpoint], "ADDRESS")
    if args.record_text and address.is_external:
        raise BadInput(f"--record-text asks engines of kvscope's own, and does not go with {args.endpoint}")
    rules, url = alarm_rules(args, has_saved_rules=False), alarm_webhook(args)
    writer = SegmentedWriter(args.out, args.segment_seconds, args.segment_bytes, reports_overview=bool(rules))
    alarms = None
    if rules:
        from kvscope_app.commands.recorded_alarms import RecordedAlarms

        alarms = RecordedAlarms(rules, url, writer, args.endpoint, _print)
    try:
        with _stop_event_on_signals() as stop_event, address.open(writer) as source:
            reason = _RecordingMonitor(args, source, writer, stop_event, started_s, alarms).run()
    finally:
        failure = writer.close()
        if alarms is not None:
            alarms.close()
    if failure:
        raise KvscopeError(failure)
    if not writer.has_started:
        raise KvscopeError(f"nothing was recorded: {reason or 'stopped before any telemetry arrived'}")
    print_line(
        f"{_file_names(writer.paths)}: {writer.recorded_s:.1f} s, {writer.num_frames} frames"
        + (f"; {reason}" if reason else "")
    )
    return 1 if reason else 0


class _RecordingMonitor:
    def __init__(
        self,
        args: argparse.Namespace,
        source: WatchedSource,
        writer: SegmentedWriter,
        stop_event: threading.Event,
        started_s: float,
        alarms: RecordedAlarms | None = None,
    ) -> None:
        self._max_wait_s: float = args.wait
        self._seconds: float = math.inf if args.seconds is None else args.seconds
        self._limit_s = min(self._max_wait_s, self._seconds)  # printed while the engine has not answered
        self._started_s = started_s
        self._endpoint: str = args.endpoint
        self._source, self._writer, self._stopped, self._alarms = source, writer, stop_event, alarms
        self._texts = None
        if args.record_text and isinstance(source, LiveSource):
            self._texts = TextRequester(source, writer.write_texts)
        self._last_present_s = self._last_printed_s = started_s
        self._last_state: tuple[SourceState, str] | None = None
        """Connection state that was printed last, with its reason.

        A reason that contains a count of seconds is left out, because it would be printed again each second.
        """

    def run(self) -> str:
        """Poll until the recording ends. Returns the reason if it ended early, otherwise an empty string."""
        end_s = self._started_s + self._seconds
        while not self._stopped.wait(max(0.0, min(POLL_S, end_s - time.monotonic()))):
            if self._alarms is not None:
                self._alarms.poll()
            if self._texts is None:
                self._source.poll_update()  # discard: nothing here shows the mirror
            else:
                self._texts.poll(len(self._writer.paths))
            status, now_s = self._source.status, time.monotonic()
            if self._texts is not None and status.role == Role.VIEWER:
                raise KvscopeError(f"--record-text needs an operator's key; you are a viewer at {self._endpoint}")
            is_refused = status.state is SourceState.REFUSED
            if not is_refused and status.state not in _ABSENT:
                self._last_present_s = now_s
            self._report(now_s)
            if self._writer.failure:
                break
            if now_s >= end_s:
                return "" if self._writer.has_started else self._end_reason(status, self._seconds)
            if now_s - self._last_present_s > (min(REFUSED_S, self._max_wait_s) if is_refused else self._max_wait_s):
                return self._end_reason(status, self._max_wait_s)
        self._report(time.monotonic())
        return ""

    def _end_reason(self, status: SourceStatus, waited_s: float) -> str:
        if status.state is SourceState.REFUSED:
            return f"the engine at {self._endpoint} does not let us in: {status.reason}"
        if status.state is SourceState.ENDED:
            return f"the engine at {self._endpoint} has stopped" + (f": {status.reason}" if status.reason else "")
        suffix = f": {status.reason}" if status.reason else ""
        return f"no telemetry from {self._endpoint} for {waited_s:g} s{suffix}"

    def _report(self, now_s: float) -> None:
        status = self._source.status
        # In other states the reason contains a count of seconds, which changes all the time.
        has_lasting_reason = status.state in (SourceState.CONNECTING, SourceState.LIVE)
        state = status.state, status.reason if has_lasting_reason else ""
        if state != self._last_state:
            waiting = f"; waiting up to {self._limit_s:g} s" if not self._last_state and status.state in _ABSENT else ""
            self._last_state = state
            _print(f"{self._endpoint}: {status.state}" + (f" ({status.reason})" if status.reason else "") + waiting)
        if sys.stderr.isatty() and now_s - self._last_printed_s >= REPORT_INTERVAL_S:
            self._last_printed_s = now_s
            print(f"\r\x1b[K{self._progress(now_s)}", end="", file=sys.stderr, flush=True)

    def _progress(self, now_s: float) -> str:
        writer = self._writer
        if not writer.has_started:
            return f"waiting for {self._endpoint}: {now_s - self._started_s:.0f} of {self._limit_s:g} s"
        lost = f", {writer.num_dropped} lost" * bool(writer.num_dropped)
        return (
            f"recording: {writer.recorded_s:.0f} s, {writer.num_frames} frames, {writer.num_bytes / 1e6:.1f} MB{lost}"
        )


def _print(line: str) -> None:
    print_line(line, file=sys.stderr, prefix="\r\x1b[K" if sys.stderr.isatty() else "")


def _file_names(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1].name}"


@contextmanager
def _stop_event_on_signals() -> Iterator[threading.Event]:
    stop_event = threading.Event()
    with handling_signals(lambda *_: stop_event.set()):
        yield stop_event


class TextRequester:
    """Requests the text of an engine's blocks for a recording without a window.

    Decides which blocks are requested; `write` writes their texts to the file. Updates the mirror of `source`. Call
    `poll` often.
    """

    def __init__(self, source: LiveSource, write: Callable[[Iterable[RecordedText]], object]) -> None:
        self._source, self._write = source, write
        self._collector = TextCollector()
        self._tag = 0
        self._num_files = 1
        self._next_s = self._last_request_s = 0.0

    def poll(self, num_files: int = 1) -> None:
        """Process replies, request the texts that are due, and write the received texts of blocks that were not reused
        since.

        Args:
            num_files: Number of files started so far. When it grows, all texts are written again, as each file must be
                complete.
        """
        if num_files != self._num_files:
            self._num_files = num_files
            self._collector.forget_written()
        update = self._source.update_mirror()
        if update is not None:
            self._collector.mark_changed(None if update.snapshot is not None else update.block_ids)
        for reply in self._source.poll_replies():
            if isinstance(reply, BlockText) and reply.tag == self._tag:
                self._collector.add_contents(reply.contents)
        mirror, now_s = self._source.mirror, time.monotonic()
        if mirror.epoch is None or now_s < self._next_s:
            return
        self._next_s = now_s + REQUEST_INTERVAL_S
        self._write(self._collector.confirmed(mirror.ledger, mirror.epoch))
        if self._collector.is_waiting and now_s - self._last_request_s > _CONNECT_TIMEOUT_S:
            self._collector.drop_pending()
        self._request_texts(self._collector.due(mirror.ledger, mirror.epoch, MAX_BLOCKS_PER_REQUEST), now_s)

    def _request_texts(self, blocks: tuple[int, ...], now_s: float) -> None:
        if not blocks:
            return
        self._tag += 1
        self._last_request_s = now_s
        try:
            self._source.send(GetBlockText(blocks=blocks, tag=self._tag))
        except EngineDead:
            self._collector.drop_pending()
