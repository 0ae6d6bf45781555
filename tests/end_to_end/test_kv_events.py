"""A consumer that knows only vLLM's wire format follows the KV cache events of a served engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from tests.end_to_end.conftest import ClientLog, RunningEngine

from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.commands import Control, Done

END_SEQ = b"\xff" * 8
START_MS = 240_000
"""Seconds for a model to load, and for any other step."""


class VllmConsumer:
    """A SUB and a DEALER socket that know what is cached in each medium, from maps alone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], live: str, replay: str) -> None:
        self.cached: set[tuple[str, int]] = set()
        self.next_seq = 0
        self.num_live = 0
        self._sub, self._dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.subscribe(b"kv")
        self._sub.connect(live)
        self._dealer.connect(replay)

    def receive(self) -> None:
        """Apply what was published meanwhile."""
        while self._sub.poll(0):
            topic, seq, payload = self._sub.recv_multipart()
            assert topic == b"kv-events"
            self.num_live += 1
            if int.from_bytes(seq, "big") > self.next_seq:
                self.replay()
            self._take(int.from_bytes(seq, "big"), payload)

    def skip(self) -> None:
        """Drop what was published meanwhile."""
        while self._sub.poll(0):
            self._sub.recv_multipart()

    def replay(self) -> None:
        """Request everything from the next batch on."""
        self._dealer.send_multipart([b"", self.next_seq.to_bytes(8, "big")])
        while True:
            assert self._dealer.poll(START_MS), "no end of the replay"
            empty, topic, seq, payload = self._dealer.recv_multipart()
            assert empty == b""
            if seq == END_SEQ:
                assert (topic, payload) == (b"", b"")
                return
            self._take(int.from_bytes(seq, "big"), payload)

    def _take(self, seq: int, payload: bytes) -> None:
        if seq < self.next_seq:
            return
        assert seq == self.next_seq, f"batch {seq} where {self.next_seq} is next"
        self.next_seq += 1
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert ts > 1_000_000_000
        assert rank == 0
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.cached.clear()
            return
        each = {(event["medium"], block_hash) for block_hash in event["block_hashes"]}
        if event["type"] == "BlockStored":
            assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
            assert event["parent_block_hash"] is None or (event["medium"], event["parent_block_hash"]) not in each
            self.cached |= each
        else:
            assert event["type"] == "BlockRemoved"
            self.cached -= each


def cached_blocks(talk: ClientLog) -> set[tuple[str, int]]:
    """Return what is cached according to the telemetry of the engine."""
    ledger = talk.source.mirror.ledger
    media = {Tier.HBM: "GPU", Tier.HOST: "CPU"}
    rows = zip(ledger.tier.tolist(), ledger.hash.tolist(), strict=True)
    return {(media[Tier(tier)], block_hash) for tier, block_hash in rows if block_hash}


def test_vllm_event_consumer_has_the_cache_of_the_engine(
    start_engine: Callable[..., RunningEngine],
    connect_client: Callable[[RunningEngine], ClientLog],
    tiny_model: Callable[..., str],
    socket_folder: Path,
) -> None:
    live, replay = f"ipc://{socket_folder}/live", f"ipc://{socket_folder}/replay"
    fields = {"enable_kv_cache_events": True, "endpoint": live, "replay_endpoint": replay, "topic": "kv-events"}
    engine = start_engine(
        *("--kv-events-config", json.dumps(fields), "--num-gpu-blocks-override", "24", "--max-model-len", "256"),
        *("--model", tiny_model(), "--dtype", "float32", "--kv-host-memory", "128KiB"),
    )
    talk = connect_client(engine)
    with zmq.Context() as context:
        there, late, torn = (VllmConsumer(context, live, replay) for _ in range(3))
        _await_subscription(talk, there)
        for number in range(3):
            talk.submit_ids(f"a{number}", (*range(3, 20), number, *range(40, 56)), max_tokens=12)
        talk.wait_for(lambda: {"a0", "a1", "a2"} <= talk.finished().keys())
        torn.replay()
        talk.wait_for(lambda: _agree(talk, there))
        before = set(there.cached)
        assert {medium for medium, _ in before} == {"GPU"}
        for number in range(6):
            talk.submit_ids(f"b{number}", (number, *range(60, 170)), max_tokens=12)
        talk.wait_for(lambda: {f"b{number}" for number in range(6)} <= talk.finished().keys())
        torn.skip()
        talk.wait_for(lambda: _agree(talk, there, torn, late))
        assert before - there.cached, "nothing was evicted"
        assert any(medium == "CPU" for medium, _ in there.cached), "nothing was put away"
        talk.source.send(Control(action="reset_prefix_cache", tag=7))
        talk.wait_for(lambda: any(isinstance(reply, Done) and reply.tag == 7 for reply in talk.replies))
        talk.wait_for(lambda: _agree(talk, there, torn, late) and not there.cached)
        context.destroy(linger=0)


def _await_subscription(talk: ClientLog, consumer: VllmConsumer) -> None:
    """Wait until no published event is missed."""
    number = 0
    while not consumer.num_live:
        number += 1
        request_id = f"w{number}"
        talk.submit_ids(request_id, (number % 250, *range(200, 250)), max_tokens=4)
        talk.wait_for(lambda request_id=request_id: request_id in talk.finished())
        consumer.receive()
    consumer.replay()


def _agree(talk: ClientLog, there: VllmConsumer, *asking: VllmConsumer) -> bool:
    """Return whether all consumers agree with the telemetry; their messages come in any order."""
    there.receive()
    for consumer in asking:
        consumer.replay()
    return all(consumer.cached == cached_blocks(talk) for consumer in (there, *asking))
