"""Contents of a summary, equal however it is computed, and the columns of many summaries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mcap.reader
import numpy as np
import pytest
from msgspec.structs import replace

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.recordings import overview as overview_module
from kvscope_telemetry.recordings.layout import EVENTS, SUMMARIES, TOPICS
from kvscope_telemetry.recordings.overview import (
    OverviewPart,
    computed_part,
    computed_parts,
    missing_from,
    read_overview,
    written_parts,
)
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.session_overview import OVERVIEW_COLUMNS, SessionOverview
from kvscope_telemetry.summaries.summary import (
    SECOND_NS,
    AddressBins,
    Summary,
    TimedEvent,
    decode_event,
    decode_summary,
    schema_of,
)


def same(one: SessionOverview, other: SessionOverview) -> bool:
    numbers = all(np.array_equal(one.column(n), other.column(n), equal_nan=True) for n in OVERVIEW_COLUMNS)
    places = np.arange(len(one))
    return (
        np.array_equal(one.time_ns, other.time_ns)
        and numbers
        and all(np.array_equal(one.bins(n, places), other.bins(n, places)) for n in AddressBins.__struct_fields__)
        and [one.events[p] for p in range(len(one.events))] == [other.events[p] for p in range(len(other.events))]
    )


def test_written_summaries_equal_those_computed_from_frames(record: Callable[..., Any]) -> None:
    """Compares the summaries in the file, those computed from its frames, and plain sums over the frames."""
    recorded = record(700)
    recording = Recording.open(recorded.path)
    written = OverviewPart.joined(written_parts(recording))
    assert missing_from(recording, written.newest_ns) is None
    computed = SessionOverview()
    computed_part(recording, recording.start_ns).append_to(computed)
    overview = read_overview(recording)
    assert same(overview, computed)
    assert len(overview) == len(set(overview.time_ns.tolist())) >= 14
    assert overview.column("num_steps").sum() == 700
    assert overview.column("decode_tokens").sum() == sum(f.batch.num_decode_tokens for f in recorded.frames)
    assert overview.column("run_ns").sum() == sum(f.timings.run_ns for f in recorded.frames)
    assert overview.column("first_token_count").sum() == sum(len(f.first_token_ns) // 8 for f in recorded.frames)
    assert len(overview.events) == sum(len(f.events) for f in recorded.frames)
    totals = recorded.frames[-1].counters
    assert overview.column("preemptions").sum() == totals.preemptions - recorded.messages[1].counters.preemptions


def test_summary_has_the_mirror_state_at_the_end_of_its_second(record: Callable[..., Any]) -> None:
    recorded = record(300)
    recording = Recording.open(recorded.path)
    overview = read_overview(recording)
    for place in (0, 2, len(overview) - 2):
        end_ns = int(overview.time_ns[place]) + SECOND_NS - 1
        mirror = recording.state_at((end_ns - recording.start_ns) / 1e9)
        assert overview.column("active_blocks")[place] == mirror.num_active
        assert overview.column("free_blocks")[place] == mirror.num_available_blocks
        assert overview.column("step")[place] == mirror.step
        held = mirror.ledger.filled[mirror.ledger.state == 1].sum()
        assert overview.column("used_slots")[place] == held
        runs = overview.free_runs(place)
        assert sum(runs) == overview.column("num_free_runs")[place]


def test_truncated_file_has_a_complete_overview(record: Callable[..., Any], tmp_path: Path) -> None:
    """Summaries are written seconds later; the missing ones are computed."""
    recorded = record(1500)
    whole = read_overview(Recording.open(recorded.path))
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(recorded.path.read_bytes()[: int(recorded.path.stat().st_size * 0.7)])
    recording = Recording.open(cut)
    written = OverviewPart.joined(written_parts(recording))
    from_ns = missing_from(recording, written.newest_ns)
    assert from_ns is not None
    overview = read_overview(recording)
    assert 0 < len(written.summaries) < len(overview) < len(whole)
    complete = len(overview) - 1  # the last second is truncated as well
    for name in OVERVIEW_COLUMNS:
        assert np.array_equal(overview.column(name)[:complete], whole.column(name)[:complete], equal_nan=True), name


def test_summaries_and_events_are_json_with_a_schema(record: Callable[..., Any]) -> None:
    recorded = record(300)
    with recorded.path.open("rb") as file:
        found = list(
            mcap.reader.make_reader(file, validate_crcs=True).iter_messages([TOPICS[SUMMARIES], TOPICS[EVENTS]])
        )
    assert found
    for schema, channel, message in found:
        assert schema is not None
        assert (schema.encoding, channel.message_encoding) == ("jsonschema", "json")
        described = json.loads(schema.data)
        value = json.loads(message.data)
        name = described["$ref"].rpartition("/")[2]
        assert set(value) <= set(described["$defs"][name]["properties"])
    assert json.loads(schema_of(Summary))["$defs"]["Summary"]["properties"]["time_ns"] == {"type": "integer"}


def test_event_with_an_old_time_does_not_disturb_the_order_of_overview_seconds(
    record: Callable[..., Any], make_messages: Callable[..., Any]
) -> None:
    """It is written with the summaries of the second in which it was received."""
    messages = make_messages(900)
    late = next(place for place, m in enumerate(messages[600:], 600) if isinstance(m, Frame) and m.events)
    old = replace(messages[late].events[0], time_ns=messages[20].time_ns)
    messages[late] = replace(messages[late], events=(old,))
    recording = Recording.open(record(messages).path)
    times_ns = [item.time_ns for item in recording.overview_items() if isinstance(item, Summary)]
    assert times_ns == sorted(times_ns)
    assert len(read_overview(recording)) == len(times_ns) > 30


def test_overview_counts_lost_frames_of_a_gap_and_continues_with_the_next_engine_run(
    make_messages: Callable[..., Any], record: Any
) -> None:
    first, second = make_messages(100), make_messages(100, epoch=2)
    lost = [m for m in first if not (isinstance(m, Frame) and 40 <= m.seq < 50)]
    overview = read_overview(Recording.open(record([*lost, *second]).path))
    assert overview.column("num_lost_frames").sum() == 10
    assert set(overview.epoch.tolist()) == {1, 2}
    assert isinstance(second[1], Snapshot)


def test_address_bins_of_a_long_overview_are_thinned_out_beyond_the_memory_limit() -> None:
    overview = SessionOverview(max_bin_bytes=10_000)
    for second in range(1000):
        bins = AddressBins(*[bytes([second % 256]) * 10] * 4, owner=second.to_bytes(4, "little") * 10)
        overview.extend([Summary(time_ns=second * SECOND_NS, epoch=1, num_rows=10, bins=bins)])
    assert overview.num_bytes < 10_000 + 700_000
    assert len(overview) == 1000
    shown = overview.bins("owner", np.arange(1000))[:, 0]
    assert (np.diff(shown) >= 0).all()
    assert np.abs(shown - np.arange(1000)).max() <= 32


def test_dropping_old_overview_seconds_keeps_the_address_bins_of_later_ones() -> None:
    overview = SessionOverview()
    first = AddressBins(active=b"\x07" * 4, owner=b"\0" * 16)
    overview.extend(
        [Summary(time_ns=n * SECOND_NS, epoch=1, num_steps=n, bins=first if n == 0 else None) for n in range(9)]
    )
    overview.extend([], [TimedEvent(n * SECOND_NS, 1, _note()) for n in range(9)])
    overview.forget_before(5 * SECOND_NS)
    assert overview.time_ns.tolist() == [n * SECOND_NS for n in range(5, 9)]
    assert overview.column("num_steps").tolist() == [5, 6, 7, 8]
    assert overview.bins("active", np.array([0, 3])).tolist() == [[7] * 4] * 2
    assert len(overview.events) == 4
    assert overview.index_at(6 * SECOND_NS + 1) == 1
    assert overview.index_at(0) == -1


def test_address_bins_of_pools_of_two_sizes_are_returned_with_the_same_width() -> None:
    overview = SessionOverview()
    overview.extend([Summary(time_ns=0, epoch=1, bins=AddressBins(active=b"\x01\x02"))])
    overview.extend([Summary(time_ns=SECOND_NS, epoch=2, bins=AddressBins(active=b"\x01\x02\x03\x04"))])
    assert overview.bins("active", np.array([-1, 0, 1])).tolist() == [[0] * 4, [1, 1, 2, 2], [1, 2, 3, 4]]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"time_ns": "x"}', b"[" * 100_000, b"\xff"])
def test_invalid_summary_is_refused(data: bytes) -> None:
    for decode in (decode_summary, decode_event):
        with pytest.raises(ProtocolError):
            decode(data)


def _note() -> Any:
    from kvscope_telemetry.messages.telemetry import Event

    return Event(kind="note", time_ns=0)


def test_address_bins_of_several_seconds_equal_those_of_each_second_alone() -> None:
    """Most seconds have no bins of their own; the seconds may be requested in any order."""
    overview = SessionOverview()
    for index in range(40):
        own = AddressBins(active=bytes([index])) if index % 7 == 3 else None
        overview.extend([Summary(time_ns=index * SECOND_NS, epoch=1, bins=own)])
    for places in ([*range(40)], [5, 20, 20, 11, 39, 3], [-1, 0, -1, 12]):
        alone = [overview.bins("active", np.array([place])) for place in places]
        wanted = [int(table[0, 0]) if table.size else 0 for table in alone]
        assert overview.bins("active", np.array(places))[:, 0].tolist() == wanted


def test_long_overview_is_read_in_parts(record, monkeypatch):
    recording = Recording.open(record(900).path)
    whole = OverviewPart.joined(written_parts(recording))
    for limit in ("_MAX_SUMMARIES", "_MAX_EVENTS"):
        monkeypatch.setattr(overview_module, limit, 4)
    parts, computed = list(written_parts(recording)), list(computed_parts(recording, recording.start_ns))
    assert len(parts) > 3
    assert len(computed) > 3
    assert max(len(part.summaries) for part in parts) == 4
    assert OverviewPart.joined(parts) == whole
    in_parts, overview = SessionOverview(), read_overview(recording)
    whole.append_to(in_parts)
    assert overview.time_ns.tolist() == in_parts.time_ns.tolist()
    assert [overview.events[at] for at in range(len(overview.events))] == [
        in_parts.events[at] for at in range(len(in_parts.events))
    ]
