"""The log of all requests: equal to the exports, correct across gaps and restarts, and bounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.exports.phase_spans import RequestHistory, read_request_histories
from kvscope_telemetry.exports.span import span_of, timed_messages
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import hybrid_recording, sample_recording
from kvscope_telemetry.request_log import Ending, RequestLog, RequestLogReader
from kvscope_telemetry.slo import latencies_by_goal

SECOND_NS = 1_000_000_000


def log_of(messages: list[TelemetryMessage], log: RequestLog | None = None) -> RequestLog:
    """Return a log of messages that were recorded when they were sent."""
    log = RequestLog() if log is None else log
    reader = RequestLogReader(log)
    for message in messages:
        reader.add_message(message, message.time_ns)
    reader.flush()
    return log


def engine(epoch: int = 1, **options: int) -> SimulatedEngine:
    """Return an engine whose steps take 10 ms each."""
    now_ns = [SECOND_NS]

    def clock() -> int:
        now_ns[0] += 1_000_000
        return now_ns[0]

    return SimulatedEngine(num_blocks=512, num_running=8, epoch=epoch, clock=clock, **options)


def known(duration_ns: int | None) -> float:
    return np.nan if duration_ns is None else duration_ns / 1e9


@pytest.mark.parametrize("path", [sample_recording(), hybrid_recording()], ids=["sample", "sample-hybrid"])
def test_latencies_and_counts_equal_those_of_the_exports(path: str) -> None:
    recording = Recording.open(path)
    messages = list(timed_messages(recording, span_of(recording)))
    histories = sorted(read_request_histories(messages), key=lambda history: history.info.number)
    reader = RequestLogReader(log := RequestLog())
    for log_time_ns, message in messages:
        reader.add_message(message, log_time_ns)
    reader.flush()
    columns, took = log.columns(), [latencies_by_goal(each.moments, each.num_output_tokens) for each in histories]

    def exported(read: Callable[[RequestHistory], float]) -> list[float]:
        return [read(history) for history in histories]

    assert columns.number.tolist() == exported(lambda each: each.info.number)
    assert np.abs(columns.arrival_ns - exported(lambda each: each.arrival_ns)).max() < 1_000_000
    assert columns.request_ids == [each.info.request_id for each in histories]
    for shown, expected in (
        (columns.num_output_tokens, exported(lambda each: each.num_output_tokens)),
        (columns.num_cached_tokens, exported(lambda each: each.num_cached_tokens)),
        (columns.num_preemptions, exported(lambda each: each.num_preemptions)),
        (columns.ttft_s, [each["ttft"] for each in took]),
        (columns.time_s, [each["e2el"] for each in took]),
        (np.nan_to_num(columns.tpot_s), [each["tpot"] for each in took]),
        (columns.queue_s, exported(lambda each: known(each.moments.queue_ns))),
        (columns.preempted_s, exported(lambda each: each.preempted_ns(recording.end_ns) / 1e9)),
    ):
        np.testing.assert_allclose(shown, expected, rtol=1e-9)
    assert [Ending(code).name.lower() for code in columns.ending] == [each.end for each in histories]


def test_requests_of_an_earlier_engine_start_are_kept() -> None:
    messages: list[TelemetryMessage] = []
    for epoch in (1, 2):
        each = engine(epoch)
        messages += [each.snapshot(), *(each.advance() for _ in range(300))]
    columns = log_of(messages).columns()
    assert set(columns.epoch.tolist()) == {1, 2}
    assert np.count_nonzero(columns.epoch == 1) == np.count_nonzero(columns.epoch == 2) > 16
    assert (np.diff(columns.key) > 0).all()


def test_times_before_the_first_snapshot_are_unknown() -> None:
    one = engine()
    for _ in range(50):
        one.advance()
    seen = one.snapshot()
    columns = log_of([seen, *(one.advance() for _ in range(300))]).columns()
    were_running = np.isin(columns.number, [info.number for info in seen.requests_info])
    were_running &= np.isfinite(columns.time_s) & (columns.num_output_tokens > 0)
    came_later = columns.has_ended & (columns.number > max(info.number for info in seen.requests_info))
    assert np.isnan(columns.ttft_s[columns.number == seen.requests_info[0].number]).all()
    assert were_running.any()
    assert came_later.any()
    assert np.isfinite(columns.ttft_s[came_later]).all()
    assert np.isfinite(columns.queue_s[came_later]).all()


def test_request_missing_after_a_gap_ended_at_an_unknown_time() -> None:
    one = engine()
    log = log_of([one.snapshot(), *(one.advance() for _ in range(30))])
    before = log.columns()
    running = set(before.number[before.state == RequestState.RUNNING].tolist())
    for _ in range(400):
        one.advance()
    after_gap = one.snapshot()
    columns = log_of([after_gap], log).columns()
    gone = np.isin(columns.number, sorted(running - {info.number for info in after_gap.requests_info}))
    assert gone.any()
    assert columns.has_ended[gone].all()
    assert np.isnan(columns.time_s[gone]).all()
    assert (columns.ending[gone] == Ending.UNKNOWN).all()


def test_oldest_requests_are_dropped_beyond_the_maximum() -> None:
    one = engine()
    log = log_of([one.snapshot(), *(one.advance() for _ in range(2_000))], RequestLog(max_requests=50))
    columns = log.columns()
    assert len(columns) <= 50
    assert columns.number.max() - columns.number.min() == len(columns) - 1
    assert log.times(int(columns.key[0])) is not None
    assert log.key_of(1, 1) is None


def test_delay_reason_names_the_holders_of_the_blocks() -> None:
    recording = Recording.open(sample_recording())
    reader = RequestLogReader(log := RequestLog())
    for log_time_ns, message in timed_messages(recording, span_of(recording)):
        reader.add_message(message, log_time_ns)
    reader.flush()
    key = log.key_of(recording.info.epochs[0], 35)
    assert key is not None
    assert log.reason(key) == (
        "waited 6.70 s for blocks held by #30, #32, #31 and 7 more (#33 was preempted meanwhile); prefill took 1.23 s; "
        "preempted for #33, 50.9 ms in total; decoded 200 tokens in 6.25 s"
    )


def test_frames_of_an_engine_start_without_a_snapshot_are_ignored() -> None:
    one, other = engine(1), engine(2)
    log = log_of([one.snapshot(), *(one.advance() for _ in range(20)), *(other.advance() for _ in range(20))])
    assert set(log.columns().epoch.tolist()) == {1}
