"""The sockets of another engine: clients that join late, ask, control, record or stop reading."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.inside.conftest import hello_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kvscope_inside import CacheState, Publisher
from kvscope_inside.detokenizer import DetokenizerProcess
from kvscope_telemetry import Mirror, Recording, connect
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import (
    BlockContent,
    BlockText,
    Control,
    Done,
    Failed,
    GetBlockText,
    GetStatus,
    Pin,
    Refused,
    Status,
    Submit,
)


def publish_step(publisher: Publisher, step: int, blocks: list[int]) -> None:
    with publisher.updating():
        publisher.state.set_blocks(blocks, state=BlockState.ACTIVE, ref_count=1, filled=step % 5, owner=1)
        publisher.publish(publisher.state.frame(step, time.monotonic_ns()))


def test_clients_that_attach_late_or_early_mirror_the_same_state(publish_state: Any) -> None:
    state = CacheState(hello_of())
    publisher, early = publish_state(state)
    early.begin()
    for step in range(1, 4):
        publish_step(publisher, step, [step, 10])
    assert [frame.seq for frame in early.frames(0.5)] == [1, 2, 3]
    late = connect(publisher.telemetry_endpoint)
    with late:
        mirror, end_s = Mirror(), time.monotonic() + 10
        while mirror.seq < 3 and time.monotonic() < end_s:
            if (update := late.poll_update()) is not None:
                mirror.apply(update)
        assert mirror.ledger.equals(early.mirror.ledger)
        assert mirror.ledger.equals(state.ledger)


def test_idle_engine_answers_status_requests(publish_state: Any) -> None:
    publisher, watcher = publish_state(CacheState(hello_of()))
    reply = watcher.ask(GetStatus(tag=4))
    assert isinstance(reply, Status)
    assert (reply.tag, reply.phase, reply.role, reply.hello) == (4, "ready", "operator", publisher.state.hello)
    assert not reply.intervenes, "an engine without actions offers interventions"


@pytest.mark.parametrize(
    "command",
    [Submit(request_id="a", prompt="b"), Control(action="pause"), Pin(blocks=(1,))],
    ids=lambda c: type(c).__name__,
)
def test_unsupported_command_is_refused_with_the_reason(command: Any, publish_state: Any) -> None:
    reply = publish_state(CacheState(hello_of()))[1].ask(command)
    assert isinstance(reply, Refused | Failed)
    assert "its own API" in reply.reason


class PausedEngineActions:
    """Actions of an engine that is paused at once."""

    paused_by = ""

    def record_activity(self, client: bytes) -> None:
        """Nothing ends here."""

    def submit(self, client: bytes, command: Any, by: str, answer: Any) -> None:
        self.paused_by = by
        answer(Done(tag=command.tag))


def test_command_of_an_operator_is_done_by_the_engine(publish_state: Any) -> None:
    watcher = publish_state(CacheState(hello_of()), actions=PausedEngineActions())[1]
    assert watcher.ask(Control(action="pause", tag=9)) == Done(tag=9)
    status = watcher.ask(GetStatus())
    assert (status.paused, status.intervenes) == (True, True)
    assert status.paused_by


def test_block_texts_come_from_the_engine(publish_state: Any) -> None:
    found = BlockContent(block=3, number=1, start=4, token_ids=(5, 6))
    watcher = publish_state(CacheState(hello_of()), contents=lambda blocks: [found for _ in blocks])[1]
    assert watcher.ask(GetBlockText(blocks=(3,), tag=2)) == BlockText(contents=(found,), tag=2)


def test_block_text_request_without_texts_gets_an_empty_answer(publish_state: Any) -> None:
    watcher = publish_state(CacheState(hello_of()))[1]
    assert watcher.ask(GetBlockText(blocks=(3,), tag=2)) == BlockText(contents=(), tag=2)


def test_token_ids_are_decoded_by_the_tokenizer_of_the_model(tmp_path: Path, publish_state: Any) -> None:
    tokenizer = Tokenizer(WordLevel({"the": 0, "cache": 1, "?": 2}, unk_token="?"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    detokenizer = DetokenizerProcess(str(tmp_path))
    try:
        held = BlockContent(block=1, token_ids=(0, 1))
        options = {"contents": lambda blocks: [held], "texts": detokenizer.texts}
        reply = publish_state(CacheState(hello_of()), **options)[1].ask(GetBlockText(blocks=(1,)))
        assert reply.contents[0].text == "the cache"
        assert detokenizer.texts([[1], []]) == ["cache", ""]
    finally:
        detokenizer.close()


def test_missing_tokenizer_gives_empty_texts(tmp_path: Path) -> None:
    detokenizer = DetokenizerProcess(str(tmp_path / "nowhere"))
    assert detokenizer.texts([[1], [2]]) == ["", ""]
    assert detokenizer.texts([[1]]) == [""]


def test_recording_starts_with_the_whole_state(publish_state: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    state = CacheState(hello_of())
    state.set_blocks([20], state=BlockState.CACHED, hash=5)
    state.frame(0, 1)  # before the recording began
    publisher, _ = publish_state(state, record=path)
    deadline = time.monotonic() + 20
    step = 0
    while step < 20 and time.monotonic() < deadline:
        step += 1
        publish_step(publisher, step, [step])
        time.sleep(0.1)
    publisher.close()
    recording = Recording.open(path)
    assert recording.state_at(1e6).ledger.differences(state.ledger) == []


def test_client_that_stops_reading_does_not_slow_the_engine(publish_state: Any) -> None:
    publisher, _ = publish_state(CacheState(hello_of(20_000)))
    blocks, took = list(range(0, 20_000, 7)), []
    for step in range(1, 1500):
        began = time.thread_time()
        publish_step(publisher, step % 60_000, blocks)
        took.append(time.thread_time() - began)
    assert max(took[100:]) < 0.5
    assert publisher.messages_dropped >= 0


def test_tcp_from_outside_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not accepted without keys"):
        Publisher("tcp://0.0.0.0:0", CacheState(hello_of()))
