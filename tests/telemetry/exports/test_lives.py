"""What happened to each request, in phases, whoever tells it."""

from __future__ import annotations

from collections.abc import Callable

from kvscope_telemetry.exports.lives import Life, PhaseKind, read_lives, within
from kvscope_telemetry.exports.span import Span, span_of, timed_messages
from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.recordings.overview import read_course
from kvscope_telemetry.recordings.reader import Recording

MS = 1_000_000


def lives_of(recording: Recording, span: Span | None = None) -> list[Life]:
    return read_lives(timed_messages(recording, span or span_of(recording)), read_course(recording).events)


def test_phases_follow_from_events(tell: Callable[..., Recording]) -> None:
    recording = tell()
    first, second = lives_of(recording)
    told = [(phase.kind, first.length_ns(phase, 0) // MS) for phase in first.phases]
    assert told == [
        (PhaseKind.QUEUED, 100),
        (PhaseKind.PREFILL, 50),
        (PhaseKind.DECODE, 150),
        (PhaseKind.SWAPPED, 300),
        (PhaseKind.DECODE, 800),
    ]
    swapped = first.phases[3]
    assert swapped.other == 2
    assert "request #2 needed 3 blocks" in swapped.cause
    assert first.queue_ns == 100 * MS
    assert first.first_token_ns == first.arrival_ns + 150 * MS
    assert (first.end, first.end_reason, first.num_output_tokens) == ("finished", "reached its limit", 8)
    assert first.aside_ns(recording.end_ns) == 300 * MS
    assert not second.is_ended
    assert (second.num_output_tokens, second.num_cached_tokens) == (6, 4)


def test_a_range_knows_from_events_what_went_before(make_messages: Callable, record: Callable) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(1500).path)
    span = span_of(recording, 40.0, 60.0)
    inside = {life.info.number: life for life in within(lives_of(recording, span), span.from_ns, span.until_ns)}
    whole = {life.info.number: life for life in within(lives_of(recording), span.from_ns, span.until_ns)}
    assert inside.keys() == whole.keys()
    seen = [number for number, life in inside.items() if life.queue_ns is not None]
    assert len(seen) > 10
    assert all(abs(inside[number].queue_ns - whole[number].queue_ns) <= 40 * MS for number in seen)
    assert any(life.arrival_ns < span.from_ns for life in inside.values())


def test_who_is_gone_after_a_hole_ended_unseen(make_messages: Callable) -> None:  # type: ignore[type-arg]
    messages = make_messages(600)
    later = Snapshot(
        hello=messages[1].hello, seq=900, step=900, time_ns=messages[-1].time_ns, blocks=messages[1].blocks
    )
    timed = [(message.time_ns, message) for message in [*messages[1:], later]]
    lives = read_lives(timed)
    assert len(lives) > 30
    assert all(life.is_ended for life in lives)
    assert {life.end for life in lives} == {"finished", "ended"}


def test_states_tell_where_no_event_does(make_messages: Callable) -> None:  # type: ignore[type-arg]
    import msgspec

    told = [(message.time_ns, message) for message in make_messages(600)[1:]]
    mute = [(at, msgspec.structs.replace(m, events=()) if isinstance(m, Frame) else m) for at, m in told]
    with_events, without = read_lives(told), read_lives(mute)
    assert [life.info.number for life in with_events] == [life.info.number for life in without]
    assert [life.num_output_tokens for life in with_events] == [life.num_output_tokens for life in without]
    assert any(phase.kind is PhaseKind.PREEMPTED for life in without for phase in life.phases)
    for life in (*with_events, *without):
        for phase, following in zip(life.phases, life.phases[1:], strict=False):
            assert phase.start_ns <= phase.end_ns == following.start_ns
