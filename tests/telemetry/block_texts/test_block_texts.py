"""Block texts: requested once, accepted only for an unchanged block, written, copied and found again."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.block_texts.block_texts import BlockTextLookup, RecordedText, TextIndex, decode_text
from kvscope_telemetry.block_texts.published_texts import PublishedTexts
from kvscope_telemetry.block_texts.text_collector import PARTIAL_EVERY, TextCollector
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import BlockState, Ledger
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring import Ring
from kvscope_telemetry.recordings.save import save
from kvscope_telemetry.recordings.writer import RecordingWriter

EPOCH = 7


@pytest.fixture
def ledger():
    """Blocks 2 and 3 are full and belong to request 1, block 4 is partly filled."""
    made = Ledger(8)
    made.state[2:5] = BlockState.ACTIVE
    made.owner[2:5] = 1
    made.filled[2:5] = 16, 16, 5
    made.hash[2:4] = 0xA2, 0xA3
    return made


def content(block, num_tokens=16, number=1):
    return BlockContent(block=block, number=number, token_ids=tuple(range(num_tokens)), text=f"block {block}")


def answer(collector, ledger, *contents):
    collector.add_contents(contents)
    return collector.confirmed(ledger, EPOCH)


def test_recorded_block_text_is_found_by_hash_wherever_the_block_moved():
    index = TextIndex()
    index.extend([RecordedText(time_ns=5, epoch=EPOCH, block=2, owner=1, hash=f"{0xA2:016x}", text="moved")])
    assert index.find(BlockTextLookup(EPOCH, 70, 9, 16, 0xA2), 99).text == "moved"
    assert index.find(BlockTextLookup(EPOCH + 1, 70, 9, 16, 0xA2), 99) is None
    small = TextIndex(max_bytes=1)
    small.extend([RecordedText(time_ns=5, epoch=EPOCH, block=2, owner=1, hash=f"{0xA2:016x}", text="gone")])
    assert small.find(BlockTextLookup(EPOCH, 2, 1, 16, 0xA2), 99) is None


def test_text_search_returns_each_text_once_in_time_order():
    def written(time_ns, block, text, hash_="", owner=1):
        return RecordedText(time_ns=time_ns, epoch=EPOCH, block=block, owner=owner, hash=hash_, text=text)

    index = TextIndex()
    index.extend(
        [
            written(5, 2, "The blue s"),
            written(7, 2, "The blue sky", "a2"),
            written(9, 70, "The blue sky", "a2"),
            written(3, 4, "BLUE", owner=8),
            written(1, 5, "red", "a5"),
        ]
    )
    assert [(text.time_ns, text.text) for text in index.search("blue", 9)] == [(3, "BLUE"), (7, "The blue sky")]
    assert [text.block for text in index.search("blue", 1)] == [4]
    assert index.search("green", 9) == []


def test_full_blocks_are_requested_once_and_filling_blocks_less_often(ledger):
    collector = TextCollector()
    assert collector.due(ledger, EPOCH, 100) == (2, 3)
    assert collector.due(ledger, EPOCH, 100) == ()
    texts = answer(collector, ledger, content(2), content(3))
    assert [(text.block, text.owner, text.hash) for text in texts] == [
        (2, 1, "00000000000000a2"),
        (3, 1, "00000000000000a3"),
    ]
    assert [collector.due(ledger, EPOCH, 100) for _ in range(PARTIAL_EVERY - 1)] == [(), (), (4,)]
    assert [text.hash for text in answer(collector, ledger, content(4, 5))] == [""]
    collector.mark_changed(np.array([2, 3, 4], np.uint32))  # of other columns
    assert not any(collector.due(ledger, EPOCH, 100) for _ in range(2 * PARTIAL_EVERY))


def test_text_of_a_block_that_changed_its_owner_is_requested_again(ledger):
    collector = TextCollector()
    collector.due(ledger, EPOCH, 100)
    ledger.owner[2], ledger.hash[2] = 9, 0xB2
    assert [text.block for text in answer(collector, ledger, content(2), content(3))] == [3]
    assert collector.due(ledger, EPOCH, 100) == (2,)


def test_block_texts_are_requested_a_few_at_a_time_until_every_block_was_requested(ledger):
    ledger.state[:], ledger.owner[:], ledger.filled[:] = BlockState.CACHED, 3, 16
    ledger.hash[:] = np.arange(1, 9)
    collector, seen = TextCollector(), []
    while asked := collector.due(ledger, EPOCH, 3):
        seen += asked
        answer(collector, ledger, *(content(block) for block in asked))
    assert sorted(seen) == list(range(8))


def test_unanswered_texts_are_requested_again(ledger):
    collector = TextCollector()
    collector.due(ledger, EPOCH, 100)
    assert collector.is_waiting
    collector.drop_pending()
    assert collector.due(ledger, EPOCH, 100) == (2, 3)


def test_blocks_without_text_are_requested_only_once(ledger):
    collector = TextCollector()
    for block in collector.due(ledger, EPOCH, 100):
        assert answer(collector, ledger, BlockContent(block=block)) == []
    assert collector.due(ledger, EPOCH, 100) == ()


def test_new_engine_and_new_file_request_all_texts_again(ledger):
    collector = TextCollector()
    answer(collector, ledger, *(content(block) for block in collector.due(ledger, EPOCH, 100)))
    collector.forget_written()
    assert collector.due(ledger, EPOCH, 100) == (2, 3)
    assert collector.due(ledger, EPOCH + 1, 100) == (2, 3)


def recorded_text(block, time_ns, owner=1, num_tokens=16, block_hash=""):
    return RecordedText(
        time_ns=time_ns,
        epoch=EPOCH,
        block=block,
        owner=owner,
        hash=block_hash,
        token_ids=(5,) * num_tokens,
        text=f"{owner} at {time_ns}",
    )


def test_text_is_found_by_the_block_state_at_that_time():
    index = TextIndex()
    index.extend(
        [
            recorded_text(3, 10, num_tokens=4),
            recorded_text(3, 20, block_hash=f"{0xAB:016x}"),
            recorded_text(3, 30, owner=2),
        ]
    )

    def found(owner, filled, block_hash, at_ns):
        content = index.find(BlockTextLookup(EPOCH, 3, owner, filled, block_hash), at_ns)
        return content and content.text

    assert found(1, 16, 0xAB, 99) == "1 at 20"
    assert found(1, 16, 0xCD, 20) is None
    assert found(1, 3, 0, 8) == "1 at 10"
    assert found(1, 9, 0, 12) == "1 at 20"
    assert found(2, 16, 0, 30) == "2 at 30"
    assert found(3, 16, 0, 30) is None
    assert index.find(BlockTextLookup(EPOCH + 1, 3, 1, 16, 0xAB), 20) is None


def test_memory_of_the_block_text_index_is_bounded_and_the_newest_texts_stay():
    index, asked, most = TextIndex(max_bytes=10_000_000), BlockTextLookup(EPOCH, 3, 1, 1_000, 0), 0
    for newest_ns in range(1_000):
        index.extend([recorded_text(3, newest_ns, num_tokens=1_000)])
        if newest_ns % 20 == 0:
            found = [index.find(asked, at_ns) for at_ns in range(newest_ns + 1)]
            most = max(most, len({content.text for content in found if content is not None}))
            assert found[-1].text == f"1 at {newest_ns}"
    assert 200 < most <= 10_000_000 // (1_000 * 32), "32 bytes per token plus overhead"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"epoch": "x", "block": 1, "owner": 2}', b"[" * 100_000, b"x" * (2 << 20)]
)
def test_invalid_text_record_is_refused(data):
    with pytest.raises(ProtocolError):
        decode_text(data)


def recorded(path, with_texts=True):
    """Record frames of a simulated engine, with block texts between them."""
    engine = SimulatedEngine(num_blocks=60, num_running=4, epoch=EPOCH)
    with RecordingWriter(path) as writer:
        texts = PublishedTexts(writer.write_texts)
        texts._next_request_s = -1.0
        for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(200))):
            writer.write(message, wait=True)
            if message is not engine.hello and with_texts:
                texts.add_message(message)
                texts._next_request_s = -1.0
                texts.add_contents(content(block) for block in texts.due())
        if with_texts:
            texts.write()
    return Recording.open(path)


def test_recording_reports_its_texts_and_replays_the_same_with_them(tmp_path):
    without, recording = recorded(tmp_path / "no.mcap", with_texts=False), recorded(tmp_path / "yes.mcap")
    assert (without.has_texts, list(without.texts())) == (False, [])
    texts = list(recording.texts())
    assert recording.has_texts
    assert len(texts) > 20
    assert all(recording.start_ns <= text.time_ns <= recording.end_ns for text in texts)
    assert recording.info.num_frames == without.info.num_frames
    assert list(recording.overview_items())
    ends = [each.state_at(each.info.duration_s) for each in (recording, without)]  # clocks are the machine's
    assert ends[0].seq == ends[1].seq == 200
    assert ends[0].ledger.equals(ends[1].ledger)
    assert recording.path.stat().st_size < 2 * without.path.stat().st_size  # texts do not change how frames are grouped
    index = TextIndex()
    index.extend(texts)
    mirror = recording.state_at(recording.info.duration_s)
    block = int(np.flatnonzero((mirror.ledger.hash != 0) & (mirror.ledger.state == BlockState.ACTIVE))[0])
    asked = BlockTextLookup(EPOCH, block, int(mirror.ledger.owner[block]), 16, int(mirror.ledger.hash[block]))
    assert index.find(asked, recording.end_ns).text == f"block {block}"


def test_recovered_and_shortened_recordings_keep_the_texts(tmp_path):
    recording = recorded(tmp_path / "a.mcap")
    save(recording, tmp_path / "b.mcap")
    whole = [msgspec.structs.replace(text, time_ns=0) for text in recording.texts()]
    assert [msgspec.structs.replace(text, time_ns=0) for text in Recording.open(tmp_path / "b.mcap").texts()] == whole
    save(recording, tmp_path / "c.mcap", recording.info.duration_s / 2)
    kept = list(Recording.open(tmp_path / "c.mcap").texts())
    held = {text.block for text in whole}
    assert {text.block for text in kept} == held
    assert len(kept) <= len(whole)


def test_recent_history_stores_the_block_texts_it_receives(tmp_path):
    engine = SimulatedEngine(num_blocks=60, num_running=4, epoch=EPOCH)
    ring = Ring(tmp_path / "ring")
    for message in (engine.hello, engine.snapshot(), engine.advance()):
        ring.write(message, wait=True)
    ring.write_texts([RecordedText(epoch=EPOCH, block=3, owner=1, text="hello")])
    ring.flush()
    ring_recording = Recording.open(ring.folder)
    assert ring_recording.has_texts
    assert [text.text for text in ring_recording.texts()] == ["hello"]
    ring.close()


def test_recorded_block_texts_can_be_read_by_other_tools_with_their_json_schema(tmp_path):
    from mcap.reader import make_reader

    recorded(tmp_path / "a.mcap")
    with (tmp_path / "a.mcap").open("rb") as file:
        reader = make_reader(file)
        schema, channel, message = next(iter(reader.iter_messages(topics=["/kvscope/texts"])))
    assert (schema.name, schema.encoding, channel.message_encoding) == ("kvscope.RecordedText", "jsonschema", "json")
    assert "token_ids" in json.loads(schema.data)["$defs"]["RecordedText"]["properties"]
    assert json.loads(message.data)["text"].startswith("block ")
