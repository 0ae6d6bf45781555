"""Mutated commands against a serving engine, and what they cost a well-behaved client.

    python tests/engine/server/fuzz_commands.py --count 1000000 --seed 1

Starts a fake engine in its own process, measures a well-behaved client alone, then sends mutated commands from several
raw connections while that client continues, and prints a line of figures: messages sent and answered, the client's
latency (alone and during the load), and the engine's resident memory before and after. The exit code is 1 if the
engine ended, a reply could not be decoded, a failure names an unexpected exception, or memory grew without bound. The
same seed gives the same messages.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvscope_telemetry.messages.commands import (
    Abort,
    ChatMessage,
    Command,
    Control,
    EstimatePrompt,
    Failed,
    Finished,
    GetBlockText,
    GetSnapshot,
    GetStatus,
    Refused,
    Status,
    Submit,
)
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.wire import decode_reply, encode

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
WINDOW = 64
"""Commands in flight per connection: more would measure the queue instead of the commands."""
MAX_GROWTH_BYTES = 96 << 20
WAIT_MS = 30_000


def good_commands() -> list[Command]:
    """Return one command of each kind and form, from which mutations are made."""
    turns = (ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="why? ü€"))
    stop = SamplingParams(max_tokens=3, n=2, stop=("a", "bb"), seed=7, logprobs=2, temperature=0.5)
    return [
        Submit(request_id="r1", prompt="hello", sampling=SamplingParams(max_tokens=2)),
        Submit(request_id="r2", messages=turns, sampling=stop),
        Submit(request_id="r3", prompt_token_ids=(1, 2, 3), raw=True, priority=9),
        Abort(request_id="r1"),
        GetSnapshot(tag=5),
        GetStatus(tag=6),
        EstimatePrompt(messages=turns, tag=9),
        GetBlockText(blocks=(0, 1, 5), tag=7),
        Control(action="reset_prefix_cache", tag=8),
    ]


def mutated(randomness: random.Random, goods: list[bytes]) -> bytes:
    """Return a message that resembles a command or nothing at all, but never one that stops or pauses the engine."""
    while True:
        data = bytearray(randomness.choice(goods))
        for _ in range(randomness.randrange(1, 6)):
            _mutate(randomness, data, goods)
        if b"shutdown" not in data and b"pause" not in data:
            return bytes(data)


def _mutate(randomness: random.Random, data: bytearray, goods: list[bytes]) -> None:
    place = randomness.randrange(len(data) + 1)
    kind = randomness.randrange(6)
    if kind == 0 and data:
        data[place % len(data)] = randomness.randrange(256)
    elif kind == 1:
        data[place:place] = randomness.randbytes(randomness.randrange(1, 9))
    elif kind == 2:
        del data[place : place + randomness.randrange(1, 9)]
    elif kind == 3:
        other = randomness.choice(goods)
        start = randomness.randrange(len(other))
        data[place:place] = other[start : start + randomness.randrange(1, 40)]
    elif kind == 4:
        data[place:place] = randomness.choice(
            (b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
        )
    else:
        data[place:place] = randomness.choice((b"\x91", b"\x81\xa1a", b"\xc0")) * randomness.randrange(1, 200)


class Fuzzer:
    """A raw connection that sends its share and reads every reply, in its own process."""

    def __init__(self, endpoint: str, count: int, seed: str) -> None:
        self.num_sent = self.num_replies = 0
        self.faults: list[str] = []
        self._endpoint, self._count = endpoint, count
        self._randomness = random.Random(seed)

    @staticmethod
    def ran(endpoint: str, count: int, seed: str) -> Fuzzer:
        """Return a finished fuzzer; runs in a process of the pool."""
        fuzzer = Fuzzer(endpoint, count, seed)
        fuzzer.run()
        return fuzzer

    def run(self) -> None:
        """Send with `WINDOW` commands in flight. A GetStatus ends each window, so that no reply is left unread."""
        context: zmq.Context[Any] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.rcvtimeo = WAIT_MS
        dealer.connect(self._endpoint)
        goods = [encode(command) for command in good_commands()]
        try:
            while self.num_sent < self._count and not self.faults:
                window = min(WINDOW, self._count - self.num_sent)
                for _ in range(window):
                    dealer.send(mutated(self._randomness, goods))
                self.num_sent += window
                self._read_to_mark(dealer, self.num_sent)
        except zmq.Again:
            self.faults.append(f"no answer for {WAIT_MS / 1000:g} s after {self.num_sent} messages")
        finally:
            dealer.close(linger=0)
            context.term()

    def _read_to_mark(self, dealer: Any, tag: int) -> None:
        dealer.send(encode(GetStatus(tag=(1 << 52) + tag)))
        while True:
            reply = decode_reply(dealer.recv())
            self.num_replies += 1
            if isinstance(reply, Status) and reply.tag == (1 << 52) + tag:
                return
            if isinstance(reply, Failed | Refused) and "the engine failed on this command" in reply.reason:
                self.faults.append(reply.reason)


class GoodClient(threading.Thread):
    """Runs one-token requests one after another and records their latencies."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.latencies_s: list[float] = []
        self.fault = ""
        self._endpoint = endpoint
        self._ending = threading.Event()

    def run(self) -> None:
        """Run until `end`."""
        context: zmq.Context[Any] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.rcvtimeo = WAIT_MS
        dealer.connect(self._endpoint)
        try:
            while not self._ending.wait(0.002):
                self._one(dealer, f"good-{len(self.latencies_s)}")
        except (zmq.Again, msgspec.MsgspecError) as error:
            self.fault = f"the good client: {error!r}"
        finally:
            dealer.close(linger=0)
            context.term()

    def end(self) -> list[float]:
        """Stop, and return the sorted latencies in seconds."""
        self._ending.set()
        self.join()
        return sorted(self.latencies_s)

    def _one(self, dealer: Any, request_id: str) -> None:
        started = time.monotonic()
        dealer.send(encode(Submit(request_id=request_id, prompt="hello", sampling=SamplingParams(max_tokens=1))))
        while not isinstance(reply := decode_reply(dealer.recv()), Finished):
            if isinstance(reply, Refused | Failed):
                self.fault = f"the good client was refused: {reply.reason}"
        self.latencies_s.append(time.monotonic() - started)


def storm(count: int, seed: int, num_connections: int, quiet_s: float) -> tuple[str, list[str]]:
    """Return the line of figures and the faults found."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        command = [sys.executable, str(FAKE_ENGINE), f"ipc://{folder}", "step_s=0.001"]
        engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert engine.stdout is not None
            engine.stdout.readline()
            return _storm(engine.pid, f"ipc://{folder}/command", count, seed, num_connections, quiet_s)
        finally:
            engine.terminate()
            engine.wait()


def _storm(
    pid: int, endpoint: str, count: int, seed: int, num_connections: int, quiet_s: float
) -> tuple[str, list[str]]:
    quiet = _quiet(endpoint, quiet_s)
    _run(endpoint, min(count, 5_000), f"{seed}-warm", num_connections)
    before = _resident_bytes(pid)
    good = GoodClient(endpoint)
    good.start()
    started = time.monotonic()
    fuzzers = _run(endpoint, count, str(seed), num_connections)
    wall_s = time.monotonic() - started
    beside = good.end()
    after = _resident_bytes(pid)
    faults = [fault for fuzzer in fuzzers for fault in fuzzer.faults] + ([good.fault] if good.fault else [])
    if after - before > MAX_GROWTH_BYTES:
        faults.append(f"the engine grew by {(after - before) >> 20} MiB")
    sent, replies = sum(f.num_sent for f in fuzzers), sum(f.num_replies for f in fuzzers)
    line = (
        f"seed {seed}: {sent} messages in {wall_s:.1f} s, {replies} replies, {len(faults)} faults;"
        f" good client p50/p99 quiet {_ms(quiet, 0.5)}/{_ms(quiet, 0.99)} ms,"
        f" beside {_ms(beside, 0.5)}/{_ms(beside, 0.99)} ms ({len(beside)} requests);"
        f" engine {before / 1e6:.1f} -> {after / 1e6:.1f} MB"
    )
    return line, faults


def _quiet(endpoint: str, seconds: float) -> list[float]:
    good = GoodClient(endpoint)
    good.start()
    time.sleep(seconds)
    return good.end()


def _run(endpoint: str, count: int, seed: str, num_connections: int) -> list[Fuzzer]:
    share = -(-count // num_connections)
    with ProcessPoolExecutor(num_connections, mp_context=multiprocessing.get_context("spawn")) as processes:
        futures = [processes.submit(Fuzzer.ran, endpoint, share, f"{seed}-{n}") for n in range(num_connections)]
        return [future.result() for future in futures]


def _ms(sorted_s: list[float], share: float) -> str:
    return f"{1e3 * sorted_s[min(len(sorted_s) - 1, int(share * len(sorted_s)))]:.1f}" if sorted_s else "-"


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def main() -> int:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="messages to send (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed sends the same messages (default: 1)")
    parser.add_argument("--connections", type=int, default=2, help="raw connections that send (default: 2)")
    parser.add_argument("--quiet-seconds", type=float, default=5.0, help="how long the quiet case is measured")
    args = parser.parse_args()
    line, faults = storm(args.count, args.seed, args.connections, args.quiet_seconds)
    print(line)
    for fault in faults[:20]:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
