"""Bookmarks in rings and files: the latest revision wins, and a saved part has the bookmarks about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mcap.reader
import pytest
from msgspec.structs import replace

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.recordings.layout import BOOKMARKS, TOPICS
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring import Ring
from kvscope_telemetry.recordings.save import save
from kvscope_telemetry.summaries.bookmark import (
    Bookmark,
    decode_bookmark,
    decode_bookmarks,
    encode_bookmark,
    encode_bookmarks,
    in_order,
    new_bookmark,
    newest_revisions,
)

MakeRing = Callable[..., Ring]
MakeSession = Callable[..., Any]


def current_bookmarks(said: list[Bookmark]) -> list[Bookmark]:
    return in_order(newest_revisions(said).values())


def test_latest_revision_wins_in_any_order() -> None:
    first = new_bookmark(10, "here")
    renamed = replace(first, text="there", revision=1)
    gone = replace(first, is_deleted=True, revision=2)
    back = replace(gone, is_deleted=False, revision=3)
    other = new_bookmark(5)
    assert current_bookmarks([first, other]) == [other, first]
    assert current_bookmarks([renamed, first, other]) == [other, renamed]
    assert current_bookmarks([first, gone, renamed]) == []
    assert current_bookmarks([back, gone, first]) == [back]


def test_bookmark_round_trips_through_json() -> None:
    bookmark = new_bookmark(1 << 60, 'a "note"\n<b>', kind="kv_usage", until_ns=(1 << 60) + 5)
    assert decode_bookmark(encode_bookmark(bookmark)) == bookmark
    assert decode_bookmarks(encode_bookmarks([bookmark, bookmark])) == [bookmark, bookmark]
    assert decode_bookmarks(encode_bookmarks([])) == []
    assert not bookmark.is_user_note
    for data in (b"", b"{}", b"[1]", b'{"bookmark_id":1,"time_ns":2}', b"[" * 100_000):
        with pytest.raises(ProtocolError):
            decode_bookmark(data)
        with pytest.raises(ProtocolError):
            decode_bookmarks((b"x" + data).decode())


def test_bookmark_is_readable_after_a_flush(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.advance(300)
    marked = new_bookmark(session.times_ns[100], "the first")
    assert ring.add_bookmark(marked)
    session.advance(400)
    late = new_bookmark(session.times_ns[-1], "the second")
    assert ring.add_bookmark(late)
    assert ring.add_bookmark(replace(marked, text="renamed", revision=1))
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    assert len(ring_recording.segments) > 3
    assert current_bookmarks(ring_recording.bookmarks()) == [replace(marked, text="renamed", revision=1), late]
    assert ring_recording.start_ns == ring.origin_ns  # a bookmark about an earlier time does not move the start
    assert [b for b in ring_recording.bookmarks() if b.revision == 0] == [marked, late]
    ring.close()


def test_bookmark_outlives_the_segments_before_it(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring(max_seconds=6.0)
    session = make_session(ring)
    session.advance(300)
    marked = new_bookmark(session.times_ns[-1], "kept")
    ring.add_bookmark(marked)
    session.advance(60)
    assert ring.flush(60.0)
    assert current_bookmarks(Recording.open(ring.folder, origin_ns=ring.origin_ns).bookmarks()) == [marked]
    ring.close()


def test_saved_part_of_a_recording_has_the_bookmarks_within_its_time(
    make_ring: MakeRing, make_session: MakeSession, tmp_path: Path
) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.advance(600)
    early, inside = new_bookmark(session.times_ns[20], "early"), new_bookmark(session.times_ns[400], "inside")
    reaching = new_bookmark(session.times_ns[50], "reaches in", "kv_usage", session.times_ns[450])
    gone = new_bookmark(session.times_ns[420], "gone")
    for said in (early, inside, reaching, gone, replace(gone, revision=1, is_deleted=True)):
        ring.add_bookmark(said)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    path = tmp_path / "saved.mcap"
    save(ring_recording, path, 6.0)
    recording = Recording.open(path)
    assert current_bookmarks(recording.bookmarks()) == [reaching, inside]
    assert (
        recording.start_ns == ring_recording.start_ns + 6_000_000_000
    )  # not moved by a bookmark about an earlier time
    assert len(list(recording.overview_items())) > 5
    with path.open("rb") as file:
        found = list(mcap.reader.make_reader(file, validate_crcs=True).iter_messages([TOPICS[BOOKMARKS]]))
    assert sorted(message.log_time for _, _, message in found) == [reaching.time_ns, inside.time_ns]
    schema = found[0][0]
    assert (schema.name, schema.encoding) == ("kvscope.Bookmark", "jsonschema")
    assert "bookmark_id" in json.dumps(json.loads(schema.data))
    save(recording, tmp_path / "again.mcap")
    assert current_bookmarks(Recording.open(tmp_path / "again.mcap").bookmarks()) == [reaching, inside]
    ring.close()


def test_closed_ring_accepts_no_bookmark(make_ring: MakeRing) -> None:
    ring = make_ring()
    ring.close()
    assert not ring.add_bookmark(new_bookmark(1))
