"""Saving a part of a recording: its states are those of the original, and an interrupted save leaves nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mcap.reader
import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.block_texts.block_texts import RecordedRequestParams, RecordedText
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, MemoryBreakdown, Snapshot
from kvscope_telemetry.recordings.mcap_file import McapFile
from kvscope_telemetry.recordings.read_budget import OpeningCancelled
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring import Ring
from kvscope_telemetry.recordings.save import save
from kvscope_telemetry.recordings.writer import RecordingWriter

Make = Callable[..., Any]


@pytest.fixture
def written(make_ring: Callable[..., Ring], make_session: Make) -> tuple[Any, Recording]:
    """A session, and the recording of its last ten seconds."""
    ring = make_ring(max_seconds=10.0)
    session = make_session(ring)
    session.advance(400)
    session.restart(epoch=2)
    session.advance(250)
    ring.close(keep=True)
    return session, Recording.open(ring.folder, origin_ns=session.times_ns[0])


@pytest.mark.parametrize(("back_s", "until_s"), [(5.0, None), (8.5, 3.0), (1e9, None)])
def test_saved_part_has_the_states_of_the_original(
    back_s: float, until_s: float | None, written: Any, assert_same_state: Callable[..., None], tmp_path: Path
) -> None:
    session, ring_recording = written
    end_s = ring_recording.info.duration_s
    from_s = max(ring_recording.first_s, end_s - back_s)
    until_s = end_s if until_s is None else end_s - until_s
    shares: list[float] = []
    save(
        ring_recording,
        tmp_path / "part.mcap",
        end_s - back_s,
        until_s,
        watch=lambda share: shares.append(share) or True,
    )
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0
    part = Recording.open(tmp_path / "part.mcap")
    assert part.info.is_complete
    assert not part.damage_summary
    assert part.start_ns == ring_recording.start_ns + round(from_s * 1e9)
    from_ns, until_ns = part.start_ns, ring_recording.start_ns + round(until_s * 1e9)
    expected = [
        message
        for message, at_ns in zip(session.messages, session.times_ns, strict=True)
        if from_ns < at_ns <= until_ns and isinstance(message, Frame | Snapshot)
    ]
    messages = [m for _, m in part.messages() if isinstance(m, Frame | Snapshot)]
    assert isinstance(messages[0], Snapshot), "it begins with the state"
    assert messages[1:] == expected
    choose = random.Random(3)
    for at_s in [0.0, part.info.duration_s, *(choose.uniform(0, part.info.duration_s) for _ in range(20))]:
        assert_same_state(part.state_at(at_s), session.mirror_at(from_ns + round(at_s * 1e9)))
    with (tmp_path / "part.mcap").open("rb") as file:
        others = mcap.reader.make_reader(file, validate_crcs=True).iter_messages()
        assert all(message.log_time <= part.end_ns for _, _, message in others)


def test_memory_is_known_from_the_start_of_a_saved_part(written: Any, tmp_path: Path) -> None:
    session, ring_recording = written
    save(ring_recording, tmp_path / "part.mcap", ring_recording.info.duration_s - 0.6)
    memory = [message for message in session.messages if isinstance(message, MemoryBreakdown) and message.epoch == 2]
    part = Recording.open(tmp_path / "part.mcap")
    assert part.memory_before(0.0, 2) in memory


def test_part_of_a_saved_file_can_be_saved(
    written: Any, tmp_path: Path, assert_same_state: Callable[..., None]
) -> None:
    session, ring_recording = written
    save(ring_recording, tmp_path / "whole.mcap", 0.0)
    whole = Recording.open(tmp_path / "whole.mcap")
    save(whole, tmp_path / "half.mcap", whole.info.duration_s / 2)
    half = Recording.open(tmp_path / "half.mcap")
    assert_same_state(half.state_at(1e9), session.mirror_at(session.times_ns[-1]))


def test_save_can_be_cancelled(written: Any, tmp_path: Path) -> None:
    _, ring_recording = written
    with pytest.raises(OpeningCancelled):
        save(ring_recording, tmp_path / "part.mcap", 0.0, watch=lambda share: share < 0.5)
    assert list(tmp_path.glob("*.mcap*")) == []


def test_full_disk_is_reported_and_leaves_no_file(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ring_recording = written
    write, written_to = McapFile.add_message, []

    def full(file: McapFile, *given: Any) -> None:
        written_to.append(file)
        if len(written_to) > 4:
            raise OSError(28, "No space left on device")
        write(file, *given)

    monkeypatch.setattr(McapFile, "add_message", full)
    with pytest.raises(KvscopeError, match=r"part\.mcap' cannot be written: No space left on device"):
        save(ring_recording, tmp_path / "part.mcap", 0.0)
    assert list(tmp_path.glob("*.mcap*")) == []


def test_existing_file_is_not_overwritten(written: Any, tmp_path: Path) -> None:
    _, ring_recording = written
    (tmp_path / "there.mcap").touch()
    with pytest.raises(BadInput, match="already exists"):
        save(ring_recording, tmp_path / "there.mcap", 0.0)
    with pytest.raises(BadInput, match="its name ends in"):
        save(ring_recording, tmp_path / "there.rrd", 0.0)


def test_part_without_a_state_is_refused_with_the_reason(tmp_path: Path) -> None:
    """The recording has frames but starts after the snapshot."""
    engine = SimulatedEngine(num_blocks=50, num_running=2)
    with RecordingWriter(tmp_path / "frames.mcap") as writer:
        writer.write(engine.hello, wait=True)
        for _ in range(100):
            writer.write(engine.advance(), wait=True)
    recorded = Recording.open(tmp_path / "frames.mcap")
    for until_s, where in ((None, "state"), (2.5, "state from 0 s to 2.5 s")):
        with pytest.raises(KvscopeError, match=f"nothing was saved: .*frames.mcap' has no readable {where}$"):
            save(recorded, tmp_path / "part.mcap", 0.0, until_s)
        assert not list(tmp_path.glob("part*"))


def test_saved_part_has_the_requests_that_ended_in_it(tmp_path: Path, make_session: Make) -> None:
    """Texts of requests belong to no block: they must not replace each other or move into the part."""
    asked = RecordedRequestParams(request_id="r", num_prompt_tokens=1, sampling=SamplingParams())
    with RecordingWriter(tmp_path / "whole.mcap") as writer:
        session = make_session(writer)
        session.advance(300)
        times = [session.times_ns[at] for at in (20, 40, 200, 220)]
        texts = [
            RecordedText(time_ns=at, epoch=1, block=-1, owner=number, number=number, token_ids=(1, 2), request=asked)
            for number, at in enumerate(times, 1)
        ]
        block = RecordedText(time_ns=times[0], epoch=1, block=3, owner=1, token_ids=(1, 2), text="held")
        writer.write_texts([*texts, block], wait=True)
    recording = Recording.open(tmp_path / "whole.mcap")
    save(recording, tmp_path / "part.mcap", (session.times_ns[100] - recording.start_ns) / 1e9)
    saved = list(Recording.open(tmp_path / "part.mcap").texts())
    assert [text.number for text in saved if text.request is not None] == [3, 4]
    assert [text.text for text in saved if text.request is None] == ["held"]
    save(recording, tmp_path / "all.mcap")
    assert list(Recording.open(tmp_path / "all.mcap").texts()) == list(recording.texts())
