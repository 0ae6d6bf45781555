"""The event index compared with a plain list, for any order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.summary import TimedEvent

events = st.builds(
    lambda time_ns, epoch, kind, number, other: TimedEvent(
        time_ns, epoch, Event(kind=kind, time_ns=0, number=number, other=other)
    ),
    st.integers(0, 50),
    st.integers(1, 2),
    st.sampled_from(["admitted", "preempted", "finished", "of a later version"]),
    st.integers(0, 3),
    st.integers(0, 3),
)


@given(st.lists(st.lists(events, max_size=8), max_size=8), st.integers(0, 50), st.integers(0, 50))
def test_event_index_finds_the_same_events_as_a_plain_list(
    batches: list[list[TimedEvent]], first: int, last: int
) -> None:
    index = EventIndex()
    plain: list[TimedEvent] = []
    for batch in batches:
        assert index.extend(batch) == len(batch)
        plain = sorted([*plain, *sorted(batch, key=lambda e: e.time_ns)], key=lambda e: e.time_ns)
    assert [index[place] for place in range(len(index))] == plain
    assert index.time_ns.tolist() == [timed.time_ns for timed in plain]
    found = [index[place] for place in index.find(first, last, {"preempted"}).tolist()]
    assert found == [e for e in plain if first <= e.time_ns <= last and e.event.kind == "preempted"]
    found = [index[place] for place in index.find(request=(1, 2)).tolist()]
    assert found == [e for e in plain if e.epoch == 1 and 2 in (e.event.number, e.event.other)]
    index.forget_before(first)
    assert [index[place] for place in range(len(index))] == [e for e in plain if e.time_ns >= first]


def test_newest_events_are_kept() -> None:
    index = EventIndex(max_events=80)
    for number in range(1000):
        index.extend([TimedEvent(number, 1, Event(kind="note", time_ns=0, number=number))])
    assert 70 <= len(index) <= 80
    assert index.num_forgotten + len(index) == 1000
    assert index[len(index) - 1].event.number == 999
    assert index.time_ns.tolist() == [index[place].time_ns for place in range(len(index))]
