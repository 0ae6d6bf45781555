"""KV events of a served engine, read by a consumer that knows vLLM's wire format and nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from tests.end_to_end.conftest import RunningEngine, Talk

from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.commands import Control, Done

END_SEQ = b"\xff" * 8
START_MS = 240_000
"""For a model to be loaded, and for anything else."""


class Consumer:
    """SUB and DEALER: what is cached, by medium, from maps alone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], live: str, replay: str) -> None:
        self.cached: set[tuple[str, int]] = set()
        self.next_seq = 0
        self.num_live = 0
        self._sub, self._dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.subscribe(b"kv")
        self._sub.connect(live)
        self._dealer.connect(replay)

    def listen(self) -> None:
        """What was published meanwhile."""
        while self._sub.poll(0):
            topic, seq, payload = self._sub.recv_multipart()
            assert topic == b"kv-events"
            self.num_live += 1
            if int.from_bytes(seq, "big") > self.next_seq:
                self.replay()
            self._take(int.from_bytes(seq, "big"), payload)

    def skip(self) -> None:
        """Lose what was published meanwhile."""
        while self._sub.poll(0):
            self._sub.recv_multipart()

    def replay(self) -> None:
        """All from the next batch on."""
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


def cached_blocks(talk: Talk) -> set[tuple[str, int]]:
    """What the engine's own telemetry says is cached."""
    ledger = talk.source.mirror.ledger
    media = {Tier.HBM: "GPU", Tier.HOST: "CPU"}
    rows = zip(ledger.tier.tolist(), ledger.hash.tolist(), strict=True)
    return {(media[Tier(tier)], block_hash) for tier, block_hash in rows if block_hash}


def test_a_consumer_of_vllms_events_has_the_engines_cache(
    start_engine: Callable[..., RunningEngine],
    talk_to: Callable[[RunningEngine], Talk],
    tiny_model: Callable[..., str],
    socket_folder: Path,
) -> None:
    live, replay = f"ipc://{socket_folder}/live", f"ipc://{socket_folder}/replay"
    fields = {"enable_kv_cache_events": True, "endpoint": live, "replay_endpoint": replay, "topic": "kv-events"}
    engine = start_engine(
        *("--kv-events-config", json.dumps(fields), "--num-gpu-blocks-override", "24", "--max-model-len", "256"),
        *("--model", tiny_model(), "--dtype", "float32", "--kv-host-memory", "128KiB"),
    )
    talk = talk_to(engine)
    with zmq.Context() as context:
        there, late, torn = (Consumer(context, live, replay) for _ in range(3))
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


def _await_subscription(talk: Talk, consumer: Consumer) -> None:
    """From here on nothing that is published is missed."""
    number = 0
    while not consumer.num_live:
        number += 1
        request_id = f"w{number}"
        talk.submit_ids(request_id, (number % 250, *range(200, 250)), max_tokens=4)
        talk.wait_for(lambda request_id=request_id: request_id in talk.finished())
        consumer.listen()
    consumer.replay()


def _agree(talk: Talk, there: Consumer, *asking: Consumer) -> bool:
    """Who listens, who asks, and what is told on the telemetry socket: they come in any order."""
    there.listen()
    for consumer in asking:
        consumer.replay()
    return all(consumer.cached == cached_blocks(talk) for consumer in (there, *asking))
