"""A real engine process with hostile, stopped, killed or late clients, and one that fails by itself."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from tests.warm_python import WarmPython

from kvscope_telemetry import LiveSource, SourceState
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    Failed,
    Finished,
    GetBlockText,
    GetSnapshot,
    GetStatus,
    Refused,
    Submit,
)
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.wire import decode_reply, encode
from kvscope_telemetry.transport.endpoints import endpoints

PROMPT = tuple(range(3, 43))
ENDLESS = 30_000
"""Tokens of requests that are aborted before their end."""


def open_files_and_memory(pid: int) -> tuple[int, int]:
    """Return open files and resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def assert_idle_and_mirrored(talk: Any, connect_client: Callable[..., Any], engine: Any) -> None:
    """Wait until nothing runs, and check that the mirror equals a new snapshot and no block is active."""
    mirror = talk.source.mirror
    late = connect_client(engine)
    fresh = late.source.mirror

    def is_even() -> bool:
        talk.source.update_mirror()
        counters = mirror.counters
        return counters.num_running == counters.num_waiting == 0 and (fresh.epoch, fresh.seq) == (
            mirror.epoch,
            mirror.seq,
        )

    late.wait_for(is_even)
    assert fresh.ledger.differences(mirror.ledger) == []
    assert mirror.num_active == 0
    late.source.close()


@contextmanager
def raw_client(engine: Any) -> Iterator[zmq.Socket[bytes]]:
    """A small client that can send any bytes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.rcvtimeo = socket.sndtimeo = 240_000
        socket.connect(endpoints(engine.endpoint).command)
        yield socket


# Hostile


def random_garbage(generator: random.Random) -> bytes:
    """Return random bytes, meaningless maps, and good commands with flipped bits or cut ends."""
    sampling = SamplingParams(max_tokens=3)
    good = [
        encode(Submit(request_id="fuzz", prompt_token_ids=PROMPT, sampling=sampling)),
        encode(Submit(request_id="fuzz", prompt="text without a tokenizer")),
        encode(Submit(request_id="fuzz", prompt_token_ids=(-5, 1 << 60), sampling=sampling)),
        encode(GetBlockText(blocks=(0, 1, 1 << 40), tag=1)),
        encode(GetStatus(tag=7)),
        encode(Abort(request_id="r0")),
        msgspec.msgpack.encode(
            {"type": generator.choice(("Submit", "Abort", "Nothing", "Control", 5)), "request_id": 5}
        ),
        msgspec.msgpack.encode({"type": "Submit", "request_id": "x", "prompt": "p", "sampling": {"temperature": -1.0}}),
        msgspec.msgpack.encode([[[[None]]]] * generator.randint(0, 50)),
    ]
    data = bytearray(generator.choice(good))
    kind = generator.randrange(4)
    if kind == 0:
        return generator.randbytes(generator.randint(0, 300))
    if kind == 1:
        del data[generator.randrange(len(data)) :]
    elif kind == 2:
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(data)


def test_malformed_commands_are_answered_and_harm_no_request(
    tiny_engine: Any, connect_client: Callable[..., Any], storm: Callable[[int, int], int]
) -> None:
    """Hundreds are sent while six requests run: each gets an answer, and the tokens of the six do not change."""
    talk = connect_client(tiny_engine)

    def outputs(prefix: str) -> list[list[int]]:
        names = [f"{prefix}{number}" for number in range(6)]
        for number, name in enumerate(names):
            talk.submit_ids(name, PROMPT[number:], max_tokens=300)
        talk.wait_for(lambda: set(names) <= set(talk.finished()))
        return [talk.token_ids(name) for name in names]

    undisturbed = outputs("before")
    outputs("warm up")
    generator = random.Random(1)
    with raw_client(tiny_engine) as socket:
        socket.send_multipart([b"two", b"parts"])
        assert isinstance(decode_reply(socket.recv()), Failed)
        before = open_files_and_memory(tiny_engine.process.pid)
        for number, name in enumerate(f"during{number}" for number in range(6)):
            talk.submit_ids(name, PROMPT[number:], max_tokens=300)
        num_failed = 0
        num_hundreds = storm(4, 30)
        for _ in range(num_hundreds):
            for _ in range(100):
                socket.send(random_garbage(generator))
            socket.send(encode(GetStatus(tag=99)))
            while getattr(reply := decode_reply(socket.recv()), "tag", None) != 99:
                num_failed += isinstance(reply, Failed | Refused)
        assert num_failed > 50 * num_hundreds
    talk.wait_for(lambda: all(f"during{number}" in talk.finished() for number in range(6)))
    assert [talk.token_ids(f"during{number}") for number in range(6)] == undisturbed
    after = open_files_and_memory(tiny_engine.process.pid)
    assert after[1] - before[1] < 32 << 20, "memory grew by more than the queue of a slow telemetry reader"
    assert_idle_and_mirrored(talk, connect_client, tiny_engine)


def test_request_ids_belong_to_a_client_and_unknown_aborts_are_answered(
    tiny_engine: Any, connect_client: Callable[..., Any]
) -> None:
    talk, other = connect_client(tiny_engine), connect_client(tiny_engine)
    talk.submit_ids("mine", PROMPT, max_tokens=200)
    talk.submit_ids("mine", PROMPT, max_tokens=5)
    talk.wait_for(lambda: any(isinstance(reply, Refused) for reply in talk.replies))
    (refused,) = (reply for reply in talk.replies if isinstance(reply, Refused))
    assert "'mine' is in use" in refused.reason
    for name in ("mine", "never heard of"):
        other.source.send(Abort(request_id=name))
    other.wait_for(lambda: len(other.replies) == 2)
    talk.wait_for(lambda: "mine" in talk.finished())
    assert talk.finished()["mine"].finish_reason == "length"
    assert len(talk.token_ids("mine")) == 200
    talk.source.send(Abort(request_id="mine"))
    talk.submit_ids("several", PROMPT, max_tokens=ENDLESS, n=3, temperature=1.0)
    talk.wait_for(lambda: len(talk.token_ids("several")) > 20)
    for _ in range(2):
        talk.source.send(Abort(request_id="several"))
    talk.wait_for(lambda: sum(getattr(reply, "finish_reason", "") == "abort" for reply in talk.replies) == 3)
    assert_idle_and_mirrored(talk, connect_client, tiny_engine)


def test_every_submitted_request_is_listed_even_if_aborted_early(
    tiny_engine: Any, connect_client: Callable[..., Any]
) -> None:
    """Aborts come while requests wait in the command queue, while their prompts are prepared, and once they are
    queued.
    """
    talk = connect_client(tiny_engine)
    assert_idle_and_mirrored(
        talk, connect_client, tiny_engine
    )  # wait until requests of clients of earlier tests have ended
    generator, ends, before = random.Random(7), Counter[str](), talk.source.mirror.counters
    num_completions: dict[str, int] = {}
    for number in range(60):
        name, is_aborted = f"sent{number}", number % 6 > 0
        length, num_completions[name] = 30_000 if is_aborted else 5, 1 + number % 2
        talk.submit_ids(name, [3 + number] * length, max_tokens=2, temperature=1.0, n=num_completions[name])
        if is_aborted:
            time.sleep(generator.choice((0.0, 0.0, 0.001, 0.02)))
            talk.source.send(Abort(request_id=name))

    def is_all_told() -> bool:
        last_words = [reply for reply in talk.replies if isinstance(reply, Finished)]
        ends.clear()
        ends.update(reply.finish_reason for reply in last_words)
        return Counter(reply.request_id for reply in last_words) == num_completions

    talk.wait_for(is_all_told)
    talk.wait_for(lambda: talk.source.mirror.counters.aborted - before.aborted == ends["abort"])
    requests = talk.source.mirror.requests
    assert Counter(name for name in requests.request_ids if name in num_completions) == num_completions
    rows = [row for row, name in enumerate(requests.request_ids) if name in num_completions]
    talk.wait_for(lambda: all(requests.state[rows] == RequestState.FINISHED))
    assert talk.source.mirror.counters.finished - before.finished == ends["length"] >= 10
    unread = num_completions.keys() - {reply.request_id for reply in talk.replies if isinstance(reply, Accepted)}
    assert unread, "no request was aborted before its prompt was prepared"
    assert_idle_and_mirrored(talk, connect_client, tiny_engine)


# Stopped, killed, late


def test_client_of_a_suspended_engine_shows_stale_and_gets_all_tokens_after_it_resumes(
    tiny_engine: Any, connect_client: Callable[..., Any]
) -> None:
    talk = connect_client(tiny_engine)
    talk.submit_ids("long", PROMPT, max_tokens=600)
    talk.wait_for(lambda: len(talk.token_ids("long")) > 20)
    os.kill(tiny_engine.process.pid, signal.SIGSTOP)
    try:
        talk.wait_for(lambda: talk.source.status.state is SourceState.STALE)
        assert talk.source.mirror.num_active > 0, "what was known is kept"
    finally:
        os.kill(tiny_engine.process.pid, signal.SIGCONT)
    talk.wait_for(lambda: talk.source.status.state is SourceState.LIVE)
    talk.wait_for(lambda: "long" in talk.finished())
    assert len(talk.token_ids("long")) == 600
    assert_idle_and_mirrored(talk, connect_client, tiny_engine)


def test_late_clients_at_random_steps_see_the_same_state(tiny_engine: Any, connect_client: Callable[..., Any]) -> None:
    talk = connect_client(tiny_engine)
    generator = random.Random(3)
    for number in range(8):
        talk.submit_ids(f"r{number}", PROMPT[number:], max_tokens=150 + 40 * number)
    joiners: list[LiveSource] = []
    files = open_files_and_memory(tiny_engine.process.pid)[0]
    try:
        for number in range(8):
            step = talk.source.mirror.step + generator.randint(1, 40)
            talk.wait_for(lambda step=step: talk.source.mirror.step >= step or "r7" in talk.finished())
            joiners.append(LiveSource(tiny_engine.endpoint))
            if number % 3 == 2:
                joiners.pop(generator.randrange(len(joiners))).close()
        talk.wait_for(lambda: talk.source.mirror.counters.num_running == 0 and "r7" in talk.finished())
        mirror = talk.source.mirror
        for joiner in joiners:
            assert joiner.wait(lambda joiner=joiner: _has_caught_up(joiner, mirror), 240)
            assert joiner.mirror.ledger.differences(mirror.ledger) == []
    finally:
        for joiner in joiners:
            joiner.close()
    assert_idle_and_mirrored(talk, connect_client, tiny_engine)
    talk.wait_for(lambda: open_files_and_memory(tiny_engine.process.pid)[0] <= files)


def _has_caught_up(joiner: LiveSource, mirror: Any) -> bool:
    joiner.update_mirror()
    return (joiner.mirror.epoch, joiner.mirror.seq) == (mirror.epoch, mirror.seq)


WATCHER = """
import os, sys, time, zmq
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.wire import encode
telemetry, command = sys.argv[1:]
context = zmq.Context()
subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
subscriber.rcvhwm = 10
subscriber.connect(telemetry)
subscriber.subscribe(b"")
dealer.connect(command)
sampling = SamplingParams(temperature=0.0, max_tokens=30_000, ignore_eos=True)
dealer.send(encode(Submit(request_id=str(os.getpid()), prompt_token_ids=(5, 6, 7), sampling=sampling)))
dealer.recv()
dealer.recv()
print("reading", flush=True)
time.sleep(600)
"""


@contextmanager
def run_watchers(engine: Any, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Run processes that subscribe, submit a request, and read nothing from then on; they are killed at the end."""
    where = endpoints(engine.endpoint)
    command = [sys.executable, "-c", WATCHER, where.telemetry, where.command]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_killed_watchers_leave_no_files_or_memory(
    tiny_engine: Any, connect_client: Callable[..., Any], amount: Any
) -> None:
    talk = connect_client(tiny_engine)

    def kill_some() -> None:
        with run_watchers(tiny_engine, 4):
            talk.wait_for(lambda: talk.source.mirror.counters.num_running >= 4)
        talk.wait_for(lambda: talk.source.mirror.counters.num_running == 0)

    kill_some()
    files, num_bytes = open_files_and_memory(tiny_engine.process.pid)
    for _ in range(amount(2, 13)):
        kill_some()
    talk.wait_for(lambda: open_files_and_memory(tiny_engine.process.pid)[0] <= files)
    assert open_files_and_memory(tiny_engine.process.pid)[1] - num_bytes < 8 << 20
    assert_idle_and_mirrored(talk, connect_client, tiny_engine)


def test_watchers_that_do_not_read_slow_no_step(
    tiny_engine: Any, connect_client: Callable[..., Any], storm: Callable[[int, int], int]
) -> None:
    """The time of a step is compared with and without three stopped subscribers in turn, and the engine's memory is
    checked.
    """
    talk = connect_client(tiny_engine)
    talk.submit_ids("load", PROMPT, max_tokens=ENDLESS)
    talk.wait_for(lambda: len(talk.token_ids("load")) > 50)

    def step_ns(num_steps: int) -> float:
        """Median time a step takes, over the next ones with a single request."""
        seen: list[int] = []

        def look() -> bool:
            talk.source.poll_replies()
            update = talk.source.update_mirror()
            if update is not None and update.series:
                alone = update.series["batch_size"] == 1
                parts = [update.series[name][alone] for name in ("schedule_ns", "run_ns", "commit_ns", "record_ns")]
                seen.extend(np.sum(parts, axis=0).tolist())
            return len(seen) >= num_steps

        assert talk.source.wait(look, 240)
        return statistics.median(seen)

    where = endpoints(tiny_engine.endpoint).telemetry
    quiet, watched = [], []
    before = open_files_and_memory(tiny_engine.process.pid)[1]
    for _ in range(storm(2, 4)):
        quiet.append(step_ns(150))
        with zmq.Context() as context:
            sockets = [context.socket(zmq.SUB) for _ in range(3)]
            for socket in sockets:
                socket.setsockopt(zmq.LINGER, 0)
                socket.rcvhwm = 1
                socket.subscribe(b"")
                socket.connect(where)
            watched.append(step_ns(150))
            for socket in sockets:
                socket.close()
    talk.source.send(Abort(request_id="load"))
    talk.wait_for(lambda: "load" in talk.finished())
    assert min(watched) < 5 * min(quiet), "the engine waits for stopped watchers"
    assert open_files_and_memory(tiny_engine.process.pid)[1] - before < 64 << 20
    assert_idle_and_mirrored(talk, connect_client, tiny_engine)


FOLLOWER = """
import hashlib, json, sys, threading
from kvscope_telemetry import LiveSource
source, last_seq = LiveSource(sys.argv[1]), []
threading.Thread(target=lambda: last_seq.append(int(sys.stdin.readline())), daemon=True).start()
first_seq = 0

def is_whole():
    accounted = source.status.frames_received + source.status.frames_dropped
    return source.mirror.seq == last_seq[0] and accounted >= last_seq[0] - first_seq

while not (last_seq and is_whole()):
    source.wait(lambda: source.update_mirror() is not None, 0.1)
    if source.mirror.seq and not first_seq:
        first_seq = source.mirror.seq
        print("following", flush=True)
rows = source.mirror.ledger.pack_all()
told = {
    "first_seq": first_seq,
    "seq": source.mirror.seq,
    "ledger": hashlib.sha256(b"".join(getattr(rows, name) for name in rows.__struct_fields__)).hexdigest(),
    "received": source.status.frames_received,
    "dropped": source.status.frames_dropped,
    "resyncs": source.status.resyncs,
}
print(json.dumps(told))
source.close()
"""


def test_watcher_that_was_suspended_catches_up(
    tiny_engine: Any, connect_client: Callable[..., Any], amount: Any
) -> None:
    """As an app on a sleeping computer, it costs the engine little and is complete soon after."""
    talk = connect_client(tiny_engine)
    talk.submit_ids("load", PROMPT, max_tokens=2 * ENDLESS)
    talk.wait_for(lambda: len(talk.token_ids("load")) > 50)
    command = [sys.executable, "-c", FOLLOWER, tiny_engine.endpoint]
    before = open_files_and_memory(tiny_engine.process.pid)[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdin is not None
        assert follower.stdout is not None
        try:
            assert follower.stdout.readline() == "following\n"
            follower.send_signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            talk.wait_for(lambda: time.monotonic() - stopped_s > amount(3, 60), 90)
            assert open_files_and_memory(tiny_engine.process.pid)[1] - before < 64 << 20
            follower.send_signal(signal.SIGCONT)
            talk.source.send(Abort(request_id="load"))
            talk.wait_for(lambda: "load" in talk.finished())
            assert_idle_and_mirrored(talk, connect_client, tiny_engine)
            answer = json.loads(follower.communicate(f"{talk.source.mirror.seq}\n", timeout=240)[0])
        finally:
            follower.kill()
    rows = talk.source.mirror.ledger.pack_all()
    ledger = hashlib.sha256(b"".join(getattr(rows, name) for name in rows.__struct_fields__)).hexdigest()
    assert (answer["seq"], answer["ledger"]) == (talk.source.mirror.seq, ledger)
    assert answer["resyncs"] <= 10
    num_frames = answer["seq"] - answer["first_seq"]
    assert num_frames <= answer["received"] + answer["dropped"] <= num_frames + 200, answer


def test_client_that_does_not_read_its_replies_uses_limited_memory(
    tiny_engine: Any, connect_client: Callable[..., Any]
) -> None:
    """Its telemetry and replies are queued within a limit, and other clients are not affected."""
    talk = connect_client(tiny_engine)
    before = open_files_and_memory(tiny_engine.process.pid)[1]
    with run_watchers(tiny_engine, 3) as processes:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        for number in range(40):
            talk.source.send(GetSnapshot(tag=number))
        talk.submit_ids("beside", PROMPT, max_tokens=800)
        talk.wait_for(lambda: "beside" in talk.finished())
        assert len(talk.token_ids("beside")) == 800
    talk.wait_for(lambda: talk.source.mirror.counters.num_running == 0)
    assert open_files_and_memory(tiny_engine.process.pid)[1] - before < 64 << 20
    assert_idle_and_mirrored(talk, connect_client, tiny_engine)


# One that breaks itself


EVIL = """
import sys
from kvscope_engine.model.runner.model_runner import ModelRunner
run, steps = ModelRunner.run, []
def evil_run(self, plan):
    steps.append(plan)
    if len(steps) > 10:
        raise ValueError("evil forward\\nin two lines")
    return run(self, plan)
ModelRunner.run = evil_run
from kvscope_engine.cli.main import main
main()
"""


def test_failed_forward_pass_ends_engine_and_requests_at_once(
    socket_folder: Path, tiny_model: Callable[..., str], connect_client: Callable[..., Any], warm_python: WarmPython
) -> None:
    options = ["--model", tiny_model(), "--num-gpu-blocks-override", "64", "--max-num-seqs", "4"]
    process = warm_python.start(["-c", EVIL, "serve", "--endpoint", f"ipc://{socket_folder}", *options])
    try:
        engine = type("Running", (), {"endpoint": f"ipc://{socket_folder}", "process": process})
        talk = connect_client(engine)
        for number in range(6):  # four run, two wait
            talk.submit_ids(f"r{number}", PROMPT, max_tokens=300)
        talk.wait_for(lambda: any(talk.token_ids(f"r{number}") for number in range(6)))
        talk.wait_for(lambda: len(talk.finished()) == 6)
        for last in talk.finished().values():
            assert last.finish_reason == "error"
            assert last.error == "the engine died in a step: ValueError: evil forward in two lines"
            assert last.usage.completion_tokens == len(talk.token_ids(last.request_id))
        talk.wait_for(lambda: talk.source.status.state is SourceState.ENDED)
        assert "evil forward" in talk.source.status.reason
        assert BlockState.ACTIVE in talk.source.mirror.ledger.state, "the desktop keeps what it knew"
        assert process.wait(240) == 1
        start, end = process.stderr.read().splitlines()
        assert start.startswith("kvscope-engine: weights: ")
        assert end == "kvscope-engine: the engine died in a step: ValueError: evil forward in two lines"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_engine_ends_in_order_on_shutdown(
    start_engine: Callable[..., Any], connect_client: Callable[..., Any], tiny_model: Callable[..., str]
) -> None:
    engine = start_engine("--model", tiny_model(max_position_embeddings=65536), "--num-gpu-blocks-override", "4096")
    talk = connect_client(engine)
    talk.submit_ids("running", PROMPT, max_tokens=ENDLESS)
    talk.wait_for(lambda: len(talk.token_ids("running")) > 5)
    engine.process.send_signal(signal.SIGTERM)
    talk.wait_for(lambda: "running" in talk.finished())
    assert talk.finished()["running"].finish_reason == "abort"
    talk.wait_for(lambda: talk.source.status.state is SourceState.ENDED)
    assert engine.process.wait(240) == 0
    (line,) = engine.process.stderr.read().splitlines()
    assert line.startswith("kvscope-engine: weights: "), "there is a line about the end"
