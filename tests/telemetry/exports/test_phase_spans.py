"""Phases of each request, from events or from states."""

from __future__ import annotations

from collections.abc import Callable

from kvscope_telemetry.exports.phase_spans import RequestHistory, histories_within, read_request_histories
from kvscope_telemetry.exports.span import Span, span_of, timed_messages
from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.request_phase import RequestPhase

MS = 1_000_000


def histories_of(recording: Recording, span: Span | None = None) -> list[RequestHistory]:
    return read_request_histories(
        timed_messages(recording, span or span_of(recording)), read_overview(recording).events
    )


def test_request_phases_of_an_export_are_derived_from_events(record_story: Callable[..., Recording]) -> None:
    recording = record_story()
    first, second = histories_of(recording)
    phases = [(phase.kind, first.length_ns(phase, 0) // MS) for phase in first.phases]
    assert phases == [
        (RequestPhase.QUEUED, 100),
        (RequestPhase.PREFILL, 50),
        (RequestPhase.DECODE, 150),
        (RequestPhase.SWAPPED, 300),
        (RequestPhase.DECODE, 800),
    ]
    swapped = first.phases[3]
    assert swapped.preemptor_number == 2
    assert "request #2 needed 3 blocks" in swapped.cause
    assert first.queue_ns == 100 * MS
    assert first.first_token_ns == first.arrival_ns + 150 * MS
    assert (first.end, first.end_reason, first.num_output_tokens) == ("finished", "reached its limit", 8)
    assert first.preempted_ns(recording.end_ns) == 300 * MS
    assert not second.is_ended
    assert (second.num_output_tokens, second.num_cached_tokens) == (6, 4)


def test_export_of_a_range_keeps_earlier_phases_of_requests_that_began_before_it(
    make_messages: Callable, record: Callable
) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(1500).path)
    span = span_of(recording, 40.0, 60.0)
    inside = {
        history.info.number: history
        for history in histories_within(histories_of(recording, span), span.from_ns, span.until_ns)
    }
    whole = {
        history.info.number: history
        for history in histories_within(histories_of(recording), span.from_ns, span.until_ns)
    }
    assert inside.keys() == whole.keys()
    seen = [number for number, history in inside.items() if history.queue_ns is not None]
    assert len(seen) > 10
    assert all(abs(inside[number].queue_ns - whole[number].queue_ns) <= 40 * MS for number in seen)
    assert any(history.arrival_ns < span.from_ns for history in inside.values())


def test_request_missing_after_a_gap_has_an_unknown_end(make_messages: Callable) -> None:  # type: ignore[type-arg]
    messages = make_messages(600)
    later = Snapshot(
        hello=messages[1].hello, seq=900, step=900, time_ns=messages[-1].time_ns, blocks=messages[1].blocks
    )
    timed = [(message.time_ns, message) for message in [*messages[1:], later]]
    histories = read_request_histories(timed)
    assert len(histories) > 30
    assert all(history.is_ended for history in histories)
    assert {history.end for history in histories} == {"finished", "ended"}


def test_request_phases_of_an_export_are_derived_from_states_if_events_are_missing(make_messages: Callable) -> None:  # type: ignore[type-arg]
    import msgspec

    messages = [(message.time_ns, message) for message in make_messages(600)[1:]]
    mute = [(at, msgspec.structs.replace(m, events=()) if isinstance(m, Frame) else m) for at, m in messages]
    with_events, without = read_request_histories(messages), read_request_histories(mute)
    assert [history.info.number for history in with_events] == [history.info.number for history in without]
    assert [history.num_output_tokens for history in with_events] == [history.num_output_tokens for history in without]
    assert any(phase.kind is RequestPhase.PREEMPTED for history in without for phase in history.phases)
    for history in (*with_events, *without):
        for phase, following in zip(history.phases, history.phases[1:], strict=False):
            assert phase.start_ns <= phase.end_ns == following.start_ns
