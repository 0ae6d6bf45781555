"""`kvscope recover`: truncated and damaged files become complete ones, without invented state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mcap.reader
import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.layout import FRAMES
from kvscope_telemetry.recordings.overview import OverviewPart, missing_from, written_parts
from kvscope_telemetry.recordings.read_budget import OpeningCancelled
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.save import save

Record = Callable[..., object]


def test_complete_file_is_recovered_unchanged(record, assert_same_state, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    recorded = record(400)
    old = Recording.open(recorded.path)
    done = save(old, tmp_path / "new.mcap")
    new = Recording.open(tmp_path / "new.mcap")
    assert (done.num_frames, done.num_without_state) == (400, 0)
    assert list(new.frames()) == list(old.frames())
    assert_same_state(new.state_at(5.0), old.state_at(5.0))


def test_part_saved_again_keeps_its_times_and_messages(record, assert_same_state, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The hello of its engine is older than the saved part."""
    save(Recording.open(record(400).path), tmp_path / "part.mcap", 2.0)
    old = Recording.open(tmp_path / "part.mcap")
    save(old, tmp_path / "new.mcap")
    new = Recording.open(tmp_path / "new.mcap")
    assert (new.start_ns, new.info.duration_s) == (old.start_ns, old.info.duration_s)
    assert list(new.messages()) == list(old.messages())
    assert_same_state(new.state_at(0.1), old.state_at(0.1))


@pytest.mark.parametrize("share", [0.3, 0.77])
def test_truncated_file_is_recovered_up_to_its_end(record, assert_same_state, tmp_path: Path, share: float) -> None:  # type: ignore[no-untyped-def]
    recorded = record(600)
    data = recorded.path.read_bytes()
    cut = tmp_path / "cut.mcap.part"
    cut.write_bytes(data[: int(share * len(data))])
    old = Recording.open(cut)
    save(old, tmp_path / "new.mcap")
    new = Recording.open(tmp_path / "new.mcap")
    assert new.info.is_complete
    assert new.damage_summary == ""
    assert 50 < new.info.num_frames == old.info.num_frames
    assert missing_from(new, OverviewPart.joined(written_parts(new)).newest_ns) is None  # the overview was rebuilt
    end_s = new.info.duration_s
    assert_same_state(new.state_at(end_s), recorded.mirror_after(2 + new.info.num_frames))
    assert cut.read_bytes() == data[: int(share * len(data))]


def test_recovery_continues_with_the_next_state_after_damage(record, assert_same_state, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    recorded = record(900)
    whole = recorded.path.read_bytes()
    with recorded.path.open("rb") as file:
        summary = mcap.reader.make_reader(file).get_summary()
    chunks = [chunk for chunk in summary.chunk_indexes if FRAMES in chunk.message_index_offsets]
    num_without_state = 0
    for place in (len(chunks) // 2, len(chunks) // 2 + 1):
        data = bytearray(whole)
        data[chunks[place].chunk_start_offset + 200] ^= 0xFF
        (tmp_path / "bad.mcap").write_bytes(bytes(data))
        old = Recording.open(tmp_path / "bad.mcap")
        done = save(old, tmp_path / f"new{place}.mcap")
        new = Recording.open(tmp_path / f"new{place}.mcap")
        assert new.info.is_complete
        assert list(new.frames()) == list(old.frames()), "what can be read is kept"
        assert done.num_frames == new.info.num_frames < 900
        num_without_state += done.num_without_state
        assert_same_state(new.state_at(new.info.duration_s), recorded.mirror_after(902))
    assert 0 < num_without_state < 100


def test_recovery_overwrites_nothing_and_leaves_no_partial_file(record, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    old = Recording.open(record(300).path)
    (tmp_path / "there.mcap").write_text("mine")
    with pytest.raises(BadInput, match="already exists"):
        save(old, tmp_path / "there.mcap")
    with pytest.raises(OpeningCancelled):
        save(old, tmp_path / "new.mcap", watch=lambda share: share < 0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["session.mcap", "there.mcap"]
