"""A message written in pieces lies in the file as one that mcap's writer was given whole."""

from __future__ import annotations

import io
import random

import pytest
from mcap.reader import make_reader

from kvscope_telemetry.recordings.piecewise_writer import SLICE_BYTES, PiecewiseWriter

SIZES = (0, 1, 1000, SLICE_BYTES - 1, SLICE_BYTES, 3 * SLICE_BYTES + 17)


def write(messages):
    """A file of (log time, pieces or bytes), by the writer of a recording."""
    stream = io.BytesIO()
    writer = PiecewiseWriter(stream, chunk_bytes=1 << 20)
    writer.start("test", "test")
    writer.register_schema("s", "", b"")
    writer.register_channel("/a", "raw", 1)
    writer.register_channel("/b", "raw", 1)
    for at_ns, data in messages:
        if isinstance(data, bytes):
            writer.add_message(1, log_time=at_ns, publish_time=at_ns, data=data)
        else:
            writer.add_in_pieces(2, at_ns, data)
    writer.finish()
    stream.seek(0)
    return stream


def random_bytes(size):
    return random.Random(size).randbytes(size // 2) + bytes(size - size // 2)


@pytest.mark.parametrize("sizes", [(0,), (1,), SIZES, (*SIZES, 2, *SIZES)])
def test_what_is_read_is_what_was_written(sizes):
    pieces = [memoryview(random_bytes(size)) for size in sizes]
    whole = b"".join(pieces)
    messages = [(10, b"first"), (20, pieces), (30, b"between"), (40, [whole]), (50, b"last")]
    reader = make_reader(write(messages), validate_crcs=True)
    found = [(message.log_time, channel.topic, message.data) for _, channel, message in reader.iter_messages()]
    assert found == [
        (10, "/a", b"first"),
        (20, "/b", whole),
        (30, "/a", b"between"),
        (40, "/b", whole),
        (50, "/a", b"last"),
    ]


def test_the_index_and_the_counts_know_it():
    stream = write([(10, b"first"), (20, [b"in ", b"pieces"]), (5, [b"early"])])
    summary = make_reader(stream).get_summary()
    assert summary.statistics.message_count == 3
    assert summary.statistics.channel_message_counts == {1: 1, 2: 2}
    assert (summary.statistics.message_start_time, summary.statistics.message_end_time) == (5, 20)
    assert summary.statistics.chunk_count == len(summary.chunk_indexes) == 3
    assert [message.data for _, _, message in make_reader(stream).iter_messages(topics=["/b"])] == [
        b"early",
        b"in pieces",
    ]


def test_a_file_may_begin_with_one():
    reader = make_reader(write([(20, [b"in ", b"pieces"])]), validate_crcs=True)
    assert [message.data for _, _, message in reader.iter_messages()] == [b"in pieces"]
    assert reader.get_summary().statistics.message_start_time == 20
