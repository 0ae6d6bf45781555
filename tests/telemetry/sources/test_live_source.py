"""The live source on real sockets: the mirror equals the engine's ledger, whatever happens in between."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.processes import needs_unix, num_open_files, resident_bytes
from tests.simulated_engine.command import COMMAND
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry import connect
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    BlockText,
    Done,
    Finished,
    GetBlockText,
    GetStatus,
    Refused,
    Reply,
    Status,
    Submit,
    Tokens,
)
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.messages.wire import decode_telemetry, encode
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.transport.host_id import host_id

WAIT_S = 60.0

MakeEndpoint = Callable[[str], str]
Serve = Callable[..., SimulatedServer]
Watch = Callable[..., LiveSource]
Treat = Callable[[bytes], list[bytes]]
MakeProxy = Callable[[str, Treat], str]
AssertMirrors = Callable[..., None]
Amount = Callable[[int, int], int]


def _is_frame(data: bytes) -> bool:
    return data.startswith(b"\x86\xa4type\xa5Frame") or b"\xa5Frame" in data[:16]


def _wait_for_frames(source: LiveSource, count: int) -> None:
    """Follow until `count` more frames arrived."""
    goal = source.status.frames_received + count

    def came() -> bool:
        source.update_mirror()
        return source.status.frames_received >= goal

    assert source.wait(came, WAIT_S), source.status


def _wait_for_state(source: LiveSource, state: SourceState) -> None:
    assert source.wait(lambda: source.status.state is state, WAIT_S), source.status


def _wait_until_live(source: LiveSource) -> None:
    """Wait until the mirror follows the engine."""
    assert source.wait(lambda: source.update_mirror() is not None and source.mirror.seq > 0, WAIT_S), source.status


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_late_source_mirrors_the_engine(
    kind: str, make_endpoint: MakeEndpoint, serve: Serve, watch: Watch, assert_mirrors: AssertMirrors
) -> None:
    server = serve(endpoint := make_endpoint(kind))
    early = watch(endpoint)
    _wait_for_frames(early, 50)
    late = watch(endpoint)
    _wait_for_frames(late, 50)
    assert_mirrors(late, server)
    assert_mirrors(early, server)
    assert early.status.frames_dropped == late.status.frames_dropped == 0
    assert early.status.resyncs == 0
    _wait_for_state(early, SourceState.LIVE)
    assert early.status.latency_ns >= 0 or not host_id()  # without an id of the boot, clocks are not compared


def test_source_opened_before_the_engine_mirrors_it(
    make_endpoint: MakeEndpoint, serve: Serve, watch: Watch, assert_mirrors: AssertMirrors
) -> None:
    source = watch(endpoint := make_endpoint("ipc"))
    assert source.status.state is SourceState.CONNECTING
    assert source.update_mirror() is None
    server = serve(endpoint)
    _wait_for_state(source, SourceState.LIVE)
    _wait_for_frames(source, 20)
    assert_mirrors(source, server)


def test_engine_is_mirrored_over_a_channel_that_drops_every_third_frame(
    make_endpoint: MakeEndpoint,
    serve: Serve,
    watch: Watch,
    proxy: MakeProxy,
    assert_mirrors: AssertMirrors,
) -> None:
    dropped: list[int] = []
    count = iter(range(1, 1 << 30))

    def drop_every_third(data: bytes) -> list[bytes]:
        if not _is_frame(data) or next(count) % 3:
            return [data]
        frame = decode_telemetry(data)
        assert isinstance(frame, Frame)
        dropped.append(frame.seq)
        return []

    server = serve(engine_endpoint := make_endpoint("ipc"))
    source = watch(proxy(engine_endpoint, drop_every_third))
    _wait_until_live(source)
    joined_at = source.mirror.seq
    _wait_for_frames(source, 200)
    assert_mirrors(source, server, go_on=False)
    assert source.status.resyncs >= 1
    since_then = sum(seq > joined_at for seq in dropped)
    assert since_then > 60
    # A missing last frame is noticed by a heartbeat, when the mirror is already right.
    assert source.wait(lambda: source.status.frames_dropped >= since_then, WAIT_S), source.status
    assert source.status.frames_dropped <= len(dropped)


def test_engine_is_mirrored_over_a_channel_that_drops_repeats_and_reorders(
    amount: Amount,
    make_endpoint: MakeEndpoint,
    serve: Serve,
    watch: Watch,
    proxy: MakeProxy,
    assert_mirrors: AssertMirrors,
) -> None:
    rng = random.Random(3)
    late: list[bytes] = []

    def treat(data: bytes) -> list[bytes]:
        chance = rng.random()
        if not _is_frame(data):
            return [data]
        if chance < 0.01:
            return []
        if chance < 0.02:
            late.append(data)
            return []
        out = [data, *late] if chance > 0.03 else [data, data, *late]
        late.clear()
        return out

    server = serve(engine_endpoint := make_endpoint("ipc"), rate=2000.0)
    started = time.monotonic()
    source = watch(proxy(engine_endpoint, treat))
    for _ in range(amount(1, 20)):
        _wait_for_frames(source, 5000)
    assert_mirrors(source, server)
    assert 1 <= source.status.resyncs <= time.monotonic() - started + 1
    assert source.status.messages_rejected == 0


def test_engine_restart_is_followed(
    make_endpoint: MakeEndpoint, serve: Serve, watch: Watch, assert_mirrors: AssertMirrors
) -> None:
    source = watch(endpoint := make_endpoint("ipc"))
    first = serve(endpoint, epoch=1)
    _wait_for_frames(source, 50)
    first.close()
    _wait_for_state(source, SourceState.ENDED)
    source.update_mirror()
    assert source.mirror.epoch == 1, "what it has is kept"
    second = serve(endpoint, epoch=2, num_blocks=700, seed=5)
    _wait_for_state(source, SourceState.LIVE)
    _wait_for_frames(source, 50)
    assert_mirrors(source, second)
    assert source.mirror.epoch == 2
    assert source.status.frames_dropped == 0


def test_unexpected_end_of_the_engine_is_reported(
    make_endpoint: MakeEndpoint, serve: Serve, watch: Watch, assert_mirrors: AssertMirrors
) -> None:
    source = watch(endpoint := make_endpoint("ipc"))
    first = serve(endpoint, epoch=1)
    _wait_for_frames(source, 20)
    first.close(goodbye=False)
    _wait_for_state(source, SourceState.ENDED)
    assert "stopped unexpectedly" in source.status.reason
    second = serve(endpoint, epoch=2)
    _wait_for_state(source, SourceState.LIVE)
    assert_mirrors(source, second)


@pytest.fixture
def engine_process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(endpoint: str, *options: str) -> subprocess.Popen[str]:
        command = [*COMMAND, "--endpoint", endpoint, *options]
        process = subprocess.Popen([*command, "--until-eof"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving")
        return process

    yield start
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


@needs_unix
def test_suspended_engine_is_stale_and_correct_after_it_continues(
    make_endpoint: MakeEndpoint,
    engine_process: Callable[..., subprocess.Popen[str]],
    watch: Watch,
) -> None:
    endpoint = make_endpoint("ipc")
    process = engine_process(endpoint, "--blocks", "500", "--epoch", "7")
    source = watch(endpoint)
    _wait_for_frames(source, 10)
    process.send_signal(signal.SIGSTOP)
    _wait_for_state(source, SourceState.STALE)
    process.send_signal(signal.SIGCONT)
    _wait_for_state(source, SourceState.LIVE)
    _wait_for_frames(source, 10)
    witness = watch(endpoint)  # a fresh snapshot is the engine's own dump
    _wait_for_frames(witness, 10)

    def agree() -> bool:
        source.update_mirror()
        witness.update_mirror()
        return source.mirror.seq == witness.mirror.seq > 0

    assert source.wait(agree, WAIT_S)
    assert source.mirror.ledger.differences(witness.mirror.ledger) == []
    process.kill()
    _wait_for_state(source, SourceState.ENDED)


def test_malformed_messages_are_counted_and_ignored(
    make_endpoint: MakeEndpoint,
    serve: Serve,
    watch: Watch,
    proxy: MakeProxy,
    assert_mirrors: AssertMirrors,
) -> None:
    rng = random.Random(4)
    num_bad = 0

    def add_noise(data: bytes) -> list[bytes]:
        nonlocal num_bad
        num_bad += 1
        noise = (rng.randbytes(rng.randrange(200)), data[: len(data) // 2], b"\x91" * 20_000)
        return [b"\xc1" + noise[num_bad % 3], data]  # 0xc1 is never used in msgpack

    server = serve(engine_endpoint := make_endpoint("ipc"))
    source = watch(proxy(engine_endpoint, add_noise))
    _wait_for_frames(source, 300)
    assert_mirrors(source, server)
    assert 300 <= source.status.messages_rejected <= num_bad
    assert source.status.frames_dropped == source.status.resyncs == 0


def test_message_whose_time_jumps_is_dropped_and_counted(
    make_endpoint: MakeEndpoint,
    serve: Serve,
    watch: Watch,
    proxy: MakeProxy,
    assert_mirrors: AssertMirrors,
) -> None:
    times: list[int] = []
    jumps = iter((2**62, 2**61, 2**60, 2**59))
    has_joined = threading.Event()

    def set_time(data: bytes) -> list[bytes]:
        if not has_joined.is_set() or not _is_frame(data):
            return [data]
        time_ns = next(jumps, None)
        frame = decode_telemetry(data)
        return [data if time_ns is None else encode(msgspec.structs.replace(frame, time_ns=time_ns))]

    server = serve(engine_endpoint := make_endpoint("ipc"))
    source = watch(proxy(engine_endpoint, set_time))
    _wait_until_live(source)
    has_joined.set()

    def sees_right_times() -> bool:
        update = source.update_mirror()
        if update is not None and "time_ns" in update.series:
            times.extend(update.series["time_ns"].tolist())
        return source.status.messages_rejected >= 4 and len(times) > 300

    assert source.wait(sees_right_times, WAIT_S)
    assert_mirrors(source, server)
    assert source.status.messages_rejected == 4
    assert all(abs(time.monotonic_ns() - each) < 600e9 for each in times)


def test_well_formed_frame_that_does_not_fit_costs_one_snapshot(
    make_endpoint: MakeEndpoint,
    serve: Serve,
    watch: Watch,
    proxy: MakeProxy,
    assert_mirrors: AssertMirrors,
) -> None:
    """The frame is in sequence but names a block that does not exist."""
    num_broken = 0
    has_joined = threading.Event()

    def break_one(data: bytes) -> list[bytes]:
        nonlocal num_broken
        if not _is_frame(data):
            return [data]
        frame = decode_telemetry(data)
        assert isinstance(frame, Frame)
        if not has_joined.is_set() or num_broken or not frame.blocks.ids:
            return [data]
        num_broken += 1
        ids = b"\xff\xff\xff\x7f" + frame.blocks.ids[4:]
        blocks = msgspec.structs.replace(frame.blocks, ids=ids)
        return [encode(msgspec.structs.replace(frame, blocks=blocks))]

    server = serve(engine_endpoint := make_endpoint("ipc"))
    source = watch(proxy(engine_endpoint, break_one))
    _wait_until_live(source)
    has_joined.set()
    _wait_for_frames(source, 300)
    assert num_broken == 1
    assert_mirrors(source, server)
    assert source.status.resyncs == 1


def test_slow_consumer_is_repaired_by_a_snapshot(
    make_endpoint: MakeEndpoint, serve: Serve, watch: Watch, assert_mirrors: AssertMirrors
) -> None:
    server = serve(endpoint := make_endpoint("ipc"), rate=1000.0)
    source = watch(endpoint, max_entries=3000)  # sixty frames or so, instead of two million entries
    assert source.wait(lambda: source.status.frames_dropped > 100, WAIT_S)
    assert_mirrors(source, server)
    assert source.status.resyncs >= 1


def _replies(source: LiveSource, until: Callable[[list[Reply]], bool]) -> list[Reply]:
    replies: list[Reply] = []

    def enough() -> bool:
        replies.extend(source.poll_replies())
        return until(replies)

    assert source.wait(enough, WAIT_S), replies
    return replies


def test_submitted_request_streams_and_appears_in_the_mirror(
    make_endpoint: MakeEndpoint, serve: Serve, watch: Watch, assert_mirrors: AssertMirrors
) -> None:
    server = serve(endpoint := make_endpoint("ipc"))
    source = watch(endpoint)
    _wait_until_live(source)
    source.send(Submit(request_id="mine", prompt="x" * 400, sampling=SamplingParams(max_tokens=5)))
    replies = _replies(source, lambda got: bool(got) and isinstance(got[-1], Finished))
    assert isinstance(replies[0], Accepted)
    assert [type(reply) for reply in replies[1:-1]] == [Tokens] * 5
    assert_mirrors(source, server)
    row = source.mirror.requests.row_of(replies[0].numbers[0])
    assert row is not None
    assert source.mirror.requests.request_ids[row] == "mine"
    assert source.mirror.requests.state[row] == RequestState.FINISHED
    assert source.mirror.requests.num_output_tokens[row] == 5


def test_commands_are_answered_and_internal_requests_stay_internal(
    make_endpoint: MakeEndpoint, serve: Serve, watch: Watch
) -> None:
    server = serve(endpoint := make_endpoint("ipc"))
    source = watch(endpoint)
    _wait_for_state(source, SourceState.LIVE)
    server.hold()
    block = int(server.engine.ledger.state.argmax())
    source.send(Submit(request_id="a", prompt="x"))
    assert [type(reply) for reply in _replies(source, bool)] == [Accepted]
    source.send(Abort(request_id="a"))
    replies = _replies(source, lambda got: len(got) == 2)
    assert {type(reply) for reply in replies} == {Done, Finished}
    source.send(GetBlockText(blocks=(block, 1999), tag=5))
    text, *others = _replies(source, bool)
    assert not others
    source.send(GetStatus(tag=6))
    assert [type(reply) for reply in _replies(source, bool)] == [Status]
    assert isinstance(text, BlockText)
    assert text.contents[0].block == block
    assert len(text.contents[0].token_ids) == server.engine.ledger.filled[block] > 0


def test_command_without_an_engine_is_refused_after_a_timeout(
    make_endpoint: MakeEndpoint, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscope_telemetry.transport.client_sockets.MAX_WAIT_NS", 100_000_000)
    source = watch(make_endpoint("ipc"))
    source.send(Submit(request_id="r", prompt="x"))
    replies = _replies(source, bool)
    assert replies == [Refused(request_id="r", reason="the engine does not answer")]


def test_commands_from_many_threads_all_arrive(make_endpoint: MakeEndpoint, serve: Serve, watch: Watch) -> None:
    serve(endpoint := make_endpoint("ipc"))
    source = watch(endpoint)

    def ask(thread: int) -> None:
        for i in range(100):
            source.send(GetStatus(tag=1 + 100 * thread + i))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    replies = _replies(source, lambda got: len(got) == 400)
    assert sorted(r.tag for r in replies if isinstance(r, Status)) == list(range(1, 401))


def test_close_is_quick_with_and_without_an_engine(make_endpoint: MakeEndpoint, serve: Serve) -> None:
    nobody = LiveSource(make_endpoint("ipc"))
    nobody.send(GetStatus())
    busy_endpoint = make_endpoint("tcp")
    serve(busy_endpoint, rate=2000.0)
    busy = LiveSource(busy_endpoint)
    _wait_for_frames(busy, 50)
    for source in (nobody, busy):
        started = time.monotonic()
        source.close()
        source.close()
        assert time.monotonic() - started < 20.0, "close waited for messages that nobody receives"
        with pytest.raises(EngineDead):
            source.send(GetStatus())


def test_command_sent_right_before_close_arrives(make_endpoint: MakeEndpoint, serve: Serve, watch: Watch) -> None:
    server = serve(endpoint := make_endpoint("ipc"), rate=20.0)
    witness = watch(endpoint)
    _wait_until_live(witness)
    with connect(endpoint) as source:
        source.send(Submit(request_id="last words", prompt="x"))
        _replies(source, bool)
        source.send(Submit(request_id="after all", prompt="x"))

    def arrived() -> bool:
        witness.update_mirror()
        return "after all" in witness.mirror.requests.request_ids

    assert witness.wait(arrived, WAIT_S)
    assert server.engine.seq > 0


def test_reconnecting_leaks_nothing(
    amount: Amount, make_endpoint: MakeEndpoint, serve: Serve, assert_mirrors: AssertMirrors
) -> None:
    server = serve(endpoint := make_endpoint("ipc"))

    def join() -> None:
        with LiveSource(endpoint) as source:
            _wait_until_live(source)

    for _ in range(10):
        join()
    before = num_open_files()
    grown: list[int] = []
    for _ in range(6):
        resident = resident_bytes()
        for _ in range(amount(50, 1000)):
            join()
        deadline = time.monotonic() + WAIT_S
        while num_open_files() > before + 8:  # sockets on the server's side close slightly later
            assert time.monotonic() < deadline
            time.sleep(0.01)
        grown.append(resident_bytes() - resident)
        if grown[-1] < 2 << 20:  # a leak would grow every time
            break
    assert grown[-1] < 2 << 20, grown
    for _ in range(amount(3, 1000)):
        with LiveSource(endpoint) as source:
            assert_mirrors(source, server)


def test_invalid_endpoint_or_key_is_refused_and_opens_nothing(tmp_path: Path) -> None:
    before = num_open_files()
    for endpoint in ("nonsense", "tcp://10.1.2.3:5600", "tcp://127.0.0.1:0"):
        with pytest.raises(BadInput):
            LiveSource(endpoint)
    for content in (None, "no key"):
        path = tmp_path / "key"
        if content is not None:
            path.write_text(content)
        with pytest.raises(BadInput, match="key"):
            LiveSource("tcp://127.0.0.1:5600", key=path)
    assert num_open_files() <= before
