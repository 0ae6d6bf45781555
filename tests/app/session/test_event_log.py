"""Test that the ring buffer of events gives the same answers as a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvscope_app.session.event_log import EventLog
from kvscope_telemetry.messages.telemetry import Event

KINDS = ("admitted", "preempted", "finished", "note")
events = st.builds(
    Event,
    kind=st.sampled_from(KINDS),
    time_ns=st.integers(0, 50),
    number=st.integers(0, 3),
    other=st.integers(0, 3),
)
batches = st.lists(st.tuples(st.lists(events, max_size=9), st.integers(1, 2)), max_size=12)


@given(batches, st.integers(1, 12), st.integers(0, 50), st.integers(0, 50), st.integers(1, 5))
def test_event_log_queries_return_the_same_events_as_filtering_a_list(reported, max_events, first_ns, last_ns, limit):
    log, model = EventLog(max_events), []
    for batch, epoch in reported:
        log.extend(batch, epoch, 10)
        model += [(len(model) + i, epoch, event) for i, event in enumerate(batch, start=1)]
    assert log.last_serial == len(model)
    kept = model[-max_events:]
    plain = [(entry.serial, entry.epoch, entry.event) for entry in log]
    assert plain == kept
    assert all(entry.time_ns == entry.event.time_ns + 10 for entry in log)

    def serials(entries):
        return [entry.serial for entry in entries]

    inside = [(s, e) for s, _, e in kept if first_ns <= e.time_ns + 10 <= last_ns]
    assert serials(log.between(first_ns, last_ns)) == [s for s, _ in inside]
    assert serials(log.between(first_ns, last_ns, "note", limit)) == [s for s, e in inside if e.kind == "note"][-limit:]
    wanted = [s for s, _, e in kept if e.kind in ("finished", "note")]
    assert serials(log.of_kinds(("note", "finished"), limit)) == wanted[-limit:]
    concerned = [s for s, epoch, e in kept if epoch == 1 and 2 in (e.number, e.other)]
    assert serials(log.of_request(1, 2)) == concerned
    assert serials(log.since(first_ns)) == [s for s, _, _ in kept if s > first_ns]
    assert serials(log.since(0, limit)) == [s for s, _, _ in kept][-limit:]
