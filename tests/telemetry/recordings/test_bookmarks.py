"""Bookmarks in a ring and in files: what was said last stands, and they go where what they are about goes."""

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
    settled,
)

MakeRing = Callable[..., Ring]
MakeSession = Callable[..., Any]


def standing(said: list[Bookmark]) -> list[Bookmark]:
    return in_order(settled(said).values())


def test_what_was_said_last_stands_whatever_the_order() -> None:
    first = new_bookmark(10, "here")
    renamed = replace(first, text="there", revision=1)
    gone = replace(first, is_deleted=True, revision=2)
    back = replace(gone, is_deleted=False, revision=3)
    other = new_bookmark(5)
    assert standing([first, other]) == [other, first]
    assert standing([renamed, first, other]) == [other, renamed]
    assert standing([first, gone, renamed]) == []
    assert standing([back, gone, first]) == [back]


def test_json_back_and_forth() -> None:
    bookmark = new_bookmark(1 << 60, 'a "note"\n<b>', kind="kv_usage", until_ns=(1 << 60) + 5)
    assert decode_bookmark(encode_bookmark(bookmark)) == bookmark
    assert decode_bookmarks(encode_bookmarks([bookmark, bookmark])) == [bookmark, bookmark]
    assert decode_bookmarks(encode_bookmarks([])) == []
    assert not bookmark.is_note
    for data in (b"", b"{}", b"[1]", b'{"bookmark_id":1,"time_ns":2}', b"[" * 100_000):
        with pytest.raises(ProtocolError):
            decode_bookmark(data)
        with pytest.raises(ProtocolError):
            decode_bookmarks((b"x" + data).decode())


def test_in_a_ring_from_the_moment_it_is_flushed(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.go_on(300)
    marked = new_bookmark(session.times_ns[100], "the first")
    assert ring.mark(marked)
    session.go_on(400)
    late = new_bookmark(session.times_ns[-1], "the second")
    assert ring.mark(late)
    assert ring.mark(replace(marked, text="renamed", revision=1))
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    assert len(ring_recording.segments) > 3
    assert standing(ring_recording.bookmarks()) == [replace(marked, text="renamed", revision=1), late]
    assert ring_recording.start_ns == ring.origin_ns  # a bookmark about earlier moves no start
    assert [b for b in ring_recording.bookmarks() if b.revision == 0] == [marked, late]
    ring.close()


def test_outlives_the_segments_before_it(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring(max_seconds=6.0)
    session = make_session(ring)
    session.go_on(300)
    marked = new_bookmark(session.times_ns[-1], "kept")
    ring.mark(marked)
    session.go_on(60)
    assert ring.flush(60.0)
    assert standing(Recording.open(ring.folder, origin_ns=ring.origin_ns).bookmarks()) == [marked]
    ring.close()


def test_saved_with_the_minutes_they_are_about(make_ring: MakeRing, make_session: MakeSession, tmp_path: Path) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.go_on(600)
    early, inside = new_bookmark(session.times_ns[20], "early"), new_bookmark(session.times_ns[400], "inside")
    reaching = new_bookmark(session.times_ns[50], "reaches in", "kv_usage", session.times_ns[450])
    gone = new_bookmark(session.times_ns[420], "gone")
    for said in (early, inside, reaching, gone, replace(gone, revision=1, is_deleted=True)):
        ring.mark(said)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    path = tmp_path / "saved.mcap"
    save(ring_recording, path, 6.0)
    recording = Recording.open(path)
    assert standing(recording.bookmarks()) == [reaching, inside]
    assert recording.start_ns == ring_recording.start_ns + 6_000_000_000  # not moved by what is about earlier
    assert len(list(recording.overview_items())) > 5
    with path.open("rb") as file:
        found = list(mcap.reader.make_reader(file, validate_crcs=True).iter_messages([TOPICS[BOOKMARKS]]))
    assert sorted(message.log_time for _, _, message in found) == [reaching.time_ns, inside.time_ns]
    schema = found[0][0]
    assert (schema.name, schema.encoding) == ("kvscope.Bookmark", "jsonschema")
    assert "bookmark_id" in json.dumps(json.loads(schema.data))
    save(recording, tmp_path / "again.mcap")
    assert standing(Recording.open(tmp_path / "again.mcap").bookmarks()) == [reaching, inside]
    ring.close()


def test_a_recording_that_ended_takes_none(make_ring: MakeRing) -> None:
    ring = make_ring()
    ring.close()
    assert not ring.mark(new_bookmark(1))
