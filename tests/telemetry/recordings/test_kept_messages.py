"""What is kept for seeking: as much as is said, the newest wanted, and the same as what is read anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvscope_telemetry.messages.telemetry import Heartbeat
from kvscope_telemetry.recordings.bundles.kept_messages import KeptMessages
from kvscope_telemetry.recordings.reader import Recording


def beat(seq: int) -> Heartbeat:
    return Heartbeat(epoch=1, time_ns=seq, seq=seq, step=seq)


def test_what_was_not_wanted_for_longest_goes_first() -> None:
    kept, file, other = KeptMessages(max_bytes=100), object(), object()
    for place in range(5):
        kept.keep(file, place, (place, beat(place)), 20)
    kept.keep(other, 0, (9, beat(9)), 101)
    assert kept.get(other, 0) is None, "too large for all the room there is"
    assert kept.get(file, 0) == (0, beat(0))
    kept.keep(other, 1, (7, beat(7)), 40)
    assert [place for place in range(5) if kept.get(file, place)] == [0, 3, 4]
    assert kept.get(other, 1) == (7, beat(7))
    assert kept.num_bytes == 100


def test_files_do_not_mix_and_nothing_is_kept_twice() -> None:
    kept, file, other = KeptMessages(max_bytes=100), object(), object()
    kept.keep(file, 1, (1, beat(1)), 30)
    kept.keep(file, 1, (1, beat(1)), 30)
    kept.keep(other, 1, (2, beat(2)), 30)
    assert (kept.get(file, 1), kept.get(other, 1)) == ((1, beat(1)), (2, beat(2)))
    assert kept.num_bytes == 60


def test_a_seek_is_the_same_however_much_was_kept(record: Callable[..., Any]) -> None:
    path = record(500, keyframe_interval_ns=2_000_000_000).path
    recordings = [Recording.open(path, None, KeptMessages(size)) for size in (0, 60_000, 1 << 30)]
    rng = random.Random(4)
    for _ in range(40):
        seconds = rng.uniform(0.0, recordings[0].info.duration_s)
        ups = [list(recording.run_up(seconds)) for recording in recordings]
        assert ups[0] == ups[1] == ups[2]
        assert ups[0][-1][0] <= seconds
