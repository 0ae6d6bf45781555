"""The wire format: golden bytes of every message, evolution in both directions, and every kind of damage."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tests.processes import peak_resident_kib
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import BlockRows
from kvscope_telemetry.messages import wire
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    AllocatorMap,
    BlockContent,
    BlockText,
    ChatMessage,
    Command,
    Control,
    Done,
    EstimatePrompt,
    Evict,
    Failed,
    Finished,
    GetAllocatorMap,
    GetBlockText,
    GetSnapshot,
    GetStatus,
    LoadAdapter,
    Pin,
    Preempt,
    PromptEstimate,
    Refused,
    Reply,
    RequestTiming,
    SetLimits,
    Status,
    Submit,
    TokenLogprobs,
    Tokens,
    UnloadAdapter,
    Unpin,
    Usage,
)
from kvscope_telemetry.messages.devices import Devices, Gpu, GpuProcess, Host, HostProcess
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import (
    Batch,
    CacheInfo,
    Counters,
    DeviceInfo,
    DeviceSample,
    Event,
    EventData,
    Fingerprints,
    Frame,
    Goodbye,
    Heartbeat,
    Hello,
    Histogram,
    MemoryBreakdown,
    ModelInfo,
    Progress,
    Reading,
    RequestInfo,
    RequestRows,
    Snapshot,
    TelemetryMessage,
    Timings,
)

GOLDEN = Path(__file__).with_name("golden_messages.txt")
"""One message per line: its name, and its bytes in hexadecimal. Since the first release lines are added, never changed:
a line that no longer decodes to the message below breaks existing recordings and running engines."""


def _rows(num_rows: int, *, ids: bool) -> BlockRows:
    return BlockRows(
        ids=b"".join(i.to_bytes(4, "little") for i in range(num_rows)) if ids else b"",
        state=bytes(i % 3 for i in range(num_rows)),
        ref_count=b"\1\0\0\0" * num_rows,
        filled=b"\4\0" * num_rows,
        owner=b"\7\0\0\0" * num_rows,
        tier=b"\0" * num_rows,
        last_used_step=b"\x0b\0\0\0" * num_rows,
        prefix_hits=b"\2\0" * num_rows,
        hash=b"\x88\x77\x66\x55\x44\x33\x22\x11" * num_rows,
    )


HELLO = Hello(
    epoch=77,
    time_ns=1_000,
    wall_time_ns=1_700_000_000_000_000_000,
    model=ModelInfo(name="tiny", architecture="LlamaForCausalLM", dtype="float32", num_layers=2),
    cache=CacheInfo(num_blocks=3, block_size=4, block_bytes=512, dtype="float32", prefix_caching=True),
    device=DeviceInfo(kind="cpu", name="a processor", total_bytes=1 << 30, num_threads=2),
    engine_version="0.1.0",
    pid=4711,
)
INFO = RequestInfo(number=7, request_id="r", arrival_ns=900, num_prompt_tokens=5, max_tokens=8, priority=-1)
REQUESTS = RequestRows(
    number=b"\7\0\0\0",
    state=b"\1",
    num_computed_tokens=b"\5\0\0\0",
    num_cached_tokens=b"\4\0\0\0",
    num_output_tokens=b"\1\0\0\0",
    num_preemptions=b"\1\0",
    table_start=b"\0\0\0\0",
    table_count=b"\2\0\0\0",
    table_blocks=b"\0\0\0\0\1\0\0\0",
)
FRAME = Frame(
    epoch=77,
    seq=3,
    step=11,
    time_ns=2_000,
    blocks=_rows(2, ids=True),
    new_requests=(INFO,),
    requests=REQUESTS,
    batch=Batch(number=b"\7\0\0\0", num_tokens=b"\5\0\0\0", num_prefill_tokens=5),
    timings=Timings(schedule_ns=1, run_ns=2, forward_ns=3, commit_ns=4, record_ns=5),
    counters=Counters(prompt_tokens=5, generation_tokens=1, num_running=1),
    events=(Event(kind="preempted", time_ns=1_999, number=7, other=6, cause="why", num_blocks=2),),
    first_token_ns=b"\1\0\0\0\0\0\0\0",
    inter_token_ns=b"\2\0\0\0\0\0\0\0",
)
SNAPSHOT = Snapshot(
    hello=HELLO,
    seq=3,
    step=11,
    time_ns=2_000,
    blocks=_rows(3, ids=False),
    requests_info=(INFO,),
    requests=REQUESTS,
    counters=Counters(prompt_tokens=5),
    tag=9,
)
PROGRESS = Progress(stage="load", detail="tensors", done=3, total=9, unit="tensors")
DEVICES = Devices(
    epoch=77,
    time_ns=3,
    gpus=(
        Gpu(
            index=0,
            name="a GPU",
            uuid="GPU-1",
            memory_total_bytes=80 << 30,
            memory_used_bytes=1 << 30,
            processes=(GpuProcess(pid=7, name="p", used_bytes=9), GpuProcess(pid=8)),
            utilization=0.5,
            throttled_by=("power_cap",),
        ),
        Gpu(index=1, fault="GPU is lost"),
    ),
    host=Host(memory_total_bytes=64 << 30, cores=(0.0, 1.0), processes=(HostProcess(pid=7, anonymous_bytes=3),)),
    used_gpus=(0,),
)

TELEMETRY: dict[str, TelemetryMessage] = {
    "Hello": HELLO,
    "Frame": FRAME,
    "Snapshot": SNAPSHOT,
    "Heartbeat": Heartbeat(epoch=77, time_ns=3, seq=3, step=11, num_unfinished=1, step_started_ns=2),
    "DeviceSample": DeviceSample(epoch=77, time_ns=3, memory_total_bytes=10, utilization=0.5),
    "MemoryBreakdown": MemoryBreakdown(epoch=77, time_ns=3, weights_bytes=4, kv_bytes=5),
    "Progress": PROGRESS,
    "Goodbye": Goodbye(epoch=77, reason="the end"),
    "Reading": Reading(
        epoch=77,
        time_ns=3,
        used_share=0.5,
        latencies=(Histogram(kind="queued", bounds_ns=b"\2" + bytes(7), counts=b"\1" + bytes(15)),),
    ),
    "Devices": DEVICES,
    "Fingerprints": Fingerprints(
        epoch=77,
        step=11,
        time_ns=3,
        num_layers=2,
        number=b"\7" + bytes(3),
        place=b"\1" + bytes(3),
        digests=bytes(range(16)),
        sampled_number=b"\7" + bytes(3),
        sampled_place=bytes(4),
        logit_sums=bytes(range(8)),
    ),
}
COMMANDS: dict[str, Command] = {
    "Submit": Submit(
        request_id="r",
        messages=(ChatMessage(role="user", content="Grüße"),),
        sampling=SamplingParams(temperature=0.0, seed=1, stop=("x",), max_tokens=None),
        priority=2,
    ),
    "Abort": Abort(request_id="r"),
    "GetSnapshot": GetSnapshot(tag=1 << 52),
    "GetStatus": GetStatus(tag=2),
    "GetBlockText": GetBlockText(blocks=(0, 5), tag=3),
    "GetAllocatorMap": GetAllocatorMap(tag=5),
    "EstimatePrompt": EstimatePrompt(messages=(ChatMessage(role="user", content="hi"),), adapter="sql", tag=9),
    "Control": Control(action="shutdown", tag=4),
    "Preempt": Preempt(number=7, how="swap", tag=5),
    "Pin": Pin(blocks=(3, 1), tag=6, with_prefix=True),
    "Unpin": Unpin(blocks=(3,), tag=7, anyones=True),
    "Evict": Evict(blocks=(2,), tag=8),
    "SetLimits": SetLimits(max_num_seqs=8, max_num_batched_tokens=512, tag=9),
    "LoadAdapter": LoadAdapter(name="sql", path="adapters/sql", tag=10),
    "UnloadAdapter": UnloadAdapter(name="sql", tag=11),
}
REPLIES: dict[str, Reply] = {
    "Accepted": Accepted(request_id="r", numbers=(7, 8), num_prompt_tokens=5),
    "Refused": Refused(request_id="r", reason="why"),
    "Tokens": Tokens(
        request_id="r",
        token_ids=(1, 2),
        text=" é",
        index=1,
        logprobs=(TokenLogprobs(token_id=1, logprob=-0.5, top=((1, -0.5),)),),
    ),
    "Finished": Finished(
        request_id="r",
        finish_reason="stop",
        usage=Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=2),
        timing=RequestTiming(queue_s=0.1, ttft_s=0.2, total_s=0.3),
    ),
    "BlockText": BlockText(contents=(BlockContent(block=5, number=7, token_ids=(1,), text="a"),), tag=3),
    "AllocatorMap": AllocatorMap(
        tag=5,
        device="cuda:0",
        took_ns=3,
        segment_address=b"\1" + bytes(7),
        segment_bytes=b"\2" + bytes(7),
        segment_stream=bytes(8),
        segment_pool=b"\1",
        segment_num_blocks=b"\1" + bytes(3),
        block_offset=bytes(8),
        block_bytes=b"\2" + bytes(7),
        block_state=b"\2",
        num_segments=1,
        num_blocks=1,
        total_bytes=2,
        cached_bytes=2,
        split_bytes=0,
        largest_cached_bytes=2,
    ),
    "Status": Status(phase="loading", telemetry_endpoint="ipc:///d/telemetry", progress=PROGRESS, tag=2),
    "Done": Done(tag=4, request_id="r"),
    "PromptEstimate": PromptEstimate(
        num_prompt_tokens=345,
        num_draft_tokens=12,
        num_cached_tokens=288,
        max_request_tokens=2_048,
        ttft_s=0.25,
        num_waiting=1,
        tag=9,
    ),
    "Failed": Failed(reason="why", tag=1),
}
DECODERS = {
    **dict.fromkeys(TELEMETRY, wire.decode_telemetry),
    **dict.fromkeys(COMMANDS, wire.decode_command),
    **dict.fromkeys(REPLIES, wire.decode_reply),
}
ALL = {**TELEMETRY, **COMMANDS, **REPLIES}


def _golden_lines() -> list[tuple[str, bytes]]:
    """Return every line ever written, oldest first. A message that got fields later has several."""
    lines = GOLDEN.read_text("ascii").split("\n")
    return [(name, bytes.fromhex(data)) for name, data in (line.split() for line in lines if line)]


def _golden() -> dict[str, bytes]:
    """Return the current bytes by name."""
    return dict(_golden_lines())


@pytest.mark.parametrize("name", ALL)
def test_stored_bytes_of_every_message_still_decode_to_the_same_message(name: str) -> None:
    for written, golden in _golden_lines():
        assert written != name or DECODERS[name](golden) == ALL[name]
    assert wire.encode(ALL[name]) == _golden()[name], "a change here is a new field: add a line, keep the old ones"


def test_every_message_type_has_stored_example_bytes() -> None:
    names = {t.__name__ for union in (TelemetryMessage, Command, Reply) for t in get_args(union)}
    assert names == set(ALL) == set(_golden())


def _with_new_fields(value: Any) -> Any:
    """Add an unknown field to every map, as a later version would."""
    if isinstance(value, dict):
        return {**{k: _with_new_fields(v) for k, v in value.items()}, "of_a_later_version": [1, {"a": None}]}
    return [_with_new_fields(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ALL)
def test_old_reader_accepts_a_newer_message(name: str) -> None:
    newer = _with_new_fields(msgspec.msgpack.decode(_golden()[name]))
    assert DECODERS[name](msgspec.msgpack.encode(newer)) == ALL[name]


def test_missing_fields_of_an_older_message_get_their_defaults() -> None:
    older = {"type": "Frame", "epoch": 1, "seq": 1, "step": 1, "time_ns": 1, "counters": {"admitted": 2}}
    frame = wire.decode_telemetry(msgspec.msgpack.encode(older))
    assert frame == Frame(epoch=1, seq=1, step=1, time_ns=1, counters=Counters(admitted=2))


def _replaced(message: Any, **changes: Any) -> bytes:
    return wire.encode(msgspec.structs.replace(message, **changes))


BLOCKS = FRAME.blocks
CONTRADICTIONS = {
    "short column": _replaced(FRAME, blocks=msgspec.structs.replace(BLOCKS, owner=b"\0" * 4)),
    "half an id": _replaced(FRAME, blocks=msgspec.structs.replace(BLOCKS, ids=b"\0" * 7)),
    "no ids": _replaced(FRAME, blocks=msgspec.structs.replace(BLOCKS, ids=b"")),
    "request columns": _replaced(FRAME, requests=msgspec.structs.replace(REQUESTS, state=b"\1\1")),
    "table longer than counted": _replaced(FRAME, requests=msgspec.structs.replace(REQUESTS, table_blocks=b"\0" * 12)),
    "too few drafts": _replaced(FRAME, requests=msgspec.structs.replace(REQUESTS, num_draft_tokens=b"\0" * 2)),
    "table without request": _replaced(FRAME, requests=RequestRows(table_blocks=b"\0" * 4)),
    "batch columns": _replaced(FRAME, batch=Batch(number=b"\0" * 4)),
    "batch not u32": _replaced(FRAME, batch=Batch(number=b"\0" * 3, num_tokens=b"\0" * 3)),
    "counts without bounds": wire.encode(
        Reading(epoch=1, time_ns=1, latencies=(Histogram(kind="queued", counts=b"1"),))
    ),
    "bounds that fall": wire.encode(
        Reading(
            epoch=1,
            time_ns=1,
            latencies=(Histogram(kind="queued", bounds_ns=(b"\2" + bytes(7)) * 2, counts=bytes(24)),),
        )
    ),
    "digests of too few layers": _replaced(TELEMETRY["Fingerprints"], digests=bytes(8)),
    "half a sum of logits": _replaced(TELEMETRY["Fingerprints"], logit_sums=bytes(4)),
    "times": _replaced(FRAME, inter_token_ns=b"\0" * 7),
    "negative seq": _replaced(FRAME, seq=-1),
    "frame 0": _replaced(FRAME, seq=0),
    "negative counter": _replaced(FRAME, counters=Counters(aborted=-1)),
    "negative timing": _replaced(FRAME, timings=Timings(run_ns=-1)),
    "counter above i64": _replaced(FRAME, counters=Counters(aborted=1 << 63)),
    "request number 0": _replaced(FRAME, new_requests=(msgspec.structs.replace(INFO, number=0),)),
    "priority": _replaced(FRAME, new_requests=(msgspec.structs.replace(INFO, priority=1 << 40),)),
    "snapshot too short": _replaced(SNAPSHOT, blocks=_rows(2, ids=False)),
    "snapshot with columns of two lengths": _replaced(
        SNAPSHOT, blocks=msgspec.structs.replace(_rows(3, ids=False), state=b"\0" * 4)
    ),
    "snapshot with ids": _replaced(SNAPSHOT, blocks=_rows(3, ids=True)),
    "absurd num_blocks": _replaced(HELLO, cache=CacheInfo(num_blocks=(64 << 20) + 1, block_size=4)),
    "no blocks": _replaced(HELLO, cache=CacheInfo(num_blocks=0, block_size=4)),
    "absurd block_size": _replaced(HELLO, cache=CacheInfo(num_blocks=3, block_size=1 << 16)),
    "later protocol": _replaced(HELLO, protocol_version=2),
    "a time beyond all clocks": _replaced(FRAME, time_ns=(1 << 62) + 1),
    "a step of 146 years": _replaced(FRAME, timings=Timings(run_ns=1 << 62)),
    "more tokens in a step than fit a u32": _replaced(FRAME, batch=Batch(num_decode_tokens=1 << 40)),
    "a first token after 584 years": _replaced(FRAME, first_token_ns=b"\xff" * 8),
    "a token 584 years after the one before": _replaced(FRAME, inter_token_ns=bytes(8) + b"\xff" * 8),
    "an event of the future": _replaced(FRAME, events=(Event(kind="finished", time_ns=FRAME.time_ns + (1 << 60)),)),
    "a wait that ended before it began": _replaced(
        FRAME, events=(Event(kind="admitted", time_ns=1, data=EventData(kind="started", waited_ns=-5)),)
    ),
    "a heartbeat beyond all clocks": _replaced(TELEMETRY["Heartbeat"], time_ns=(1 << 63) - 1),
    "a sample beyond all clocks": _replaced(TELEMETRY["DeviceSample"], time_ns=(1 << 63) - 1),
    "negative heartbeat": _replaced(TELEMETRY["Heartbeat"], seq=-3),
    "negative epoch": _replaced(TELEMETRY["Goodbye"], epoch=-3),
    "negative memory of a GPU": _replaced(DEVICES, gpus=(Gpu(index=0, memory_used_bytes=-1),)),
    "a temperature that is no number": _replaced(DEVICES, gpus=(Gpu(index=0, temperature_celsius=float("nan")),)),
    "more processes than any machine": _replaced(DEVICES, gpus=(Gpu(index=0, processes=(GpuProcess(pid=1),) * 5000),)),
    "a core that is infinitely busy": _replaced(DEVICES, host=Host(cores=(float("inf"),))),
    "negative progress": _replaced(PROGRESS, done=-3),
    "empty": b"",
    "truncated": wire.encode(FRAME)[:-1],
    "trailing bytes": wire.encode(FRAME) + b"\0",
    "not UTF-8": wire.encode(TELEMETRY["Goodbye"]).replace(b"the end", b"the \xff\xfe\xfd"),
    "nested too deep": b"\x91" * 100_000 + b"\x00",
    "nested in an unknown field": b"\x82\xa4type\xa7Goodbye\xa1x" + b"\x91" * 100_000 + b"\x00",
    "claims 4 GiB": b"\x82\xa4type\xa5Frame\xa5epoch\xc6\xff\xff\xff\xff",
    "unknown tag": msgspec.msgpack.encode({"type": "Later"}),
    "a command": wire.encode(GetStatus()),
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94.",
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictory_message_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ProtocolError) as error:
        wire.decode_telemetry(CONTRADICTIONS[name])
    assert 0 < len(str(error.value)) < 400
    assert "\n" not in str(error.value)


def test_snapshot_and_hello_in_a_reply_are_validated() -> None:
    with pytest.raises(ProtocolError):
        wire.decode_reply(CONTRADICTIONS["snapshot too short"])
    hello = msgspec.structs.replace(HELLO, protocol_version=2)
    status = wire.encode(Status(phase="ready", telemetry_endpoint="e", hello=hello))
    with pytest.raises(ProtocolError, match="protocol 2"):
        wire.decode_reply(status)


@pytest.mark.parametrize(
    "command",
    [
        {"type": "Submit", "request_id": ""},
        {"type": "Submit", "request_id": "r", "prompt": "x", "sampling": {"temperature": -1.0}},
        {"type": "Submit", "request_id": "r", "prompt": "x", "sampling": {"n": 1 << 31}},
        {"type": "Submit", "request_id": "r", "priority": 1001},
        {"type": "Abort", "request_id": 129 * "x"},
        {"type": "GetBlockText", "blocks": [-1]},
        {"type": "GetBlockText", "blocks": [0] * 4097},
        {"type": "GetSnapshot", "tag": -1},
        {"type": "Control", "action": "explode"},
    ],
)
def test_command_out_of_range_is_refused(command: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_command(msgspec.msgpack.encode(command))


def _decode_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode every snapshot in pieces, as is done for large ones."""
    monkeypatch.setattr(wire, "_LARGE_BYTES", 0)


@pytest.mark.parametrize("snapshot", [SNAPSHOT, SimulatedEngine(num_blocks=50).snapshot(tag=3)], ids=["golden", "made"])
def test_snapshot_decoded_in_pieces_is_the_same(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    _decode_in_pieces(monkeypatch)
    assert wire.decode_reply(wire.encode(snapshot)) == snapshot
    newer = msgspec.msgpack.encode(msgspec.msgpack.decode(wire.encode(snapshot)) | {"a_later_field": 1})
    assert wire.decode_reply(newer) == snapshot
    assert wire.decode_reply(wire.encode(Done(tag=4))) == Done(tag=4)


def test_damaged_snapshot_decoded_in_pieces_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _decode_in_pieces(monkeypatch)
    document = msgspec.msgpack.decode(wire.encode(SNAPSHOT))
    missing = {key: value for key, value in document.items() if key != "blocks"}
    for wrong in (
        missing,
        document | {"blocks": 1},
        document | {"blocks": {"state": 7}},
        document | {"blocks": {"state": b""}},
    ):
        with pytest.raises(ProtocolError):
            wire.decode_reply(msgspec.msgpack.encode(wrong))
    whole = wire.encode(SNAPSHOT)
    for end in range(1, len(whole), 7):
        with pytest.raises(ProtocolError):
            wire.decode_reply(whole[:end])


def test_oversized_message_is_refused_before_decoding() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        wire.decode_command(bytes((8 << 20) + 1))


def _damaged(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    at = rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    if kind == 2:
        return data[:at] + data[at + rng.randrange(1, 9) :]
    damaged = bytearray(data)
    for _ in range(1 if kind == 3 else rng.randrange(2, 20)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def test_damaged_messages_are_decoded_or_refused_quickly_without_memory_growth(
    amount: Callable[[int, int], int],
) -> None:
    rng = random.Random(20_26)
    engine = SimulatedEngine(num_blocks=200)
    good = [wire.encode(message) for message in (*ALL.values(), engine.advance(), engine.advance())]
    decoders = (wire.decode_telemetry, wire.decode_command, wire.decode_reply)
    before_kib = peak_resident_kib()
    slowest_s, num_refused = 0.0, 0
    count = amount(20_000, 100_000)
    for i in range(count):
        data = _damaged(rng.choice(good), rng)
        started = time.thread_time()
        try:
            decoders[i % 3](data)
        except ProtocolError:
            num_refused += 1
        slowest_s = max(slowest_s, time.thread_time() - started)
    assert num_refused > count // 2
    assert slowest_s < 2.0
    assert peak_resident_kib() - before_kib < 20 << 10
