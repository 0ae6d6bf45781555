"""Fuzzing of telemetry messages and recordings by mutation.

    python -m tests.telemetry.fuzz --messages 100000 --recordings 10000 [--seed N]

prints counts. It exits with code 1 at the first exception that is not one of ours, at a case that takes longer than
its limit, and when memory grows. The tests run a small part of it. Everything follows from the seed and the number of
the case: `--seed N --first K` starts with case K.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.processes import peak_resident_kib
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.errors import BadInput, ProtocolError, UnknownMessage
from kvscope_telemetry.messages import wire
from kvscope_telemetry.messages.telemetry import Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.request_index import recorded_requests
from kvscope_telemetry.recordings.writer import RecordingWriter

CASE_S = 20
"""A case that takes longer is considered to hang, even on a busy machine."""
MAX_GROWTH_KIB = 192 << 10
"""Allowed growth of the memory peak after the first tenth of the cases: what one case may need temporarily."""
_INTERESTING = (0, 1, 2, 3, 4, 0x7F, 0x80, 0x81, 0xC0, 0xC1, 0xC4, 0xC6, 0xCA, 0xCF, 0xD3, 0xDB, 0xDD, 0xDF, 0xFF)


class Hang(Exception):
    """A case took longer than `CASE_S`."""


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one to four mutations: cut, insert, remove, repeat, move, flip, overwrite."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_MUTATIONS)(data, rng) or data
    return data


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randrange(1, 17)) + data[at:]


def _remove(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 17) :]


def _double(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    part = data[start : start + rng.randrange(1, 4096)]
    return data[:start] + part * rng.randrange(2, 9) + data[start:]


def _move(data: bytes, rng: random.Random) -> bytes:
    start, to = rng.randrange(len(data)), rng.randrange(len(data))
    part = data[start : start + rng.randrange(1, 65)]
    return data[:to] + part + data[to + len(part) :]


def _flip(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    """Overwrite with values that have a meaning in msgpack, or with the largest numbers of 4 and 8 bytes."""
    damaged, at = bytearray(data), rng.randrange(len(data))
    if rng.random() < 0.3:
        width = rng.choice((4, 8))
        damaged[at : at + width] = rng.choice((b"\xff", b"\x7f", b"\x00")) * width
    else:
        damaged[at] = rng.choice(_INTERESTING)
    return bytes(damaged)


_MUTATIONS: Sequence[Callable[[bytes, random.Random], bytes]] = (
    _cut,
    _insert,
    _remove,
    _double,
    _move,
    _flip,
    _flip,
    _overwrite,
    _overwrite,
)


def fuzz_messages(count: int, seed: int, first: int = 0) -> Counter[str]:
    """Decode `count` mutated messages and apply the readable ones to a mirror. Returns counts by outcome."""
    engine = SimulatedEngine(num_blocks=200, seed=seed)
    snapshot = engine.snapshot()
    good = [wire.encode(message) for message in _messages(engine)]
    outcomes: Counter[str] = Counter()
    for case in range(first, first + count):
        rng = random.Random(f"{seed}/{case}")
        data = mutated(rng.choice(good), rng)
        with _case(f"message {case} of seed {seed}"):
            outcomes[_read_message(data, snapshot)] += 1
    return outcomes


def fuzz_recordings(count: int, seed: int, folder: Path, first: int = 0) -> Counter[str]:
    """Open `count` mutated recordings and read them completely. Returns counts by outcome."""
    good = [_recording(folder, number, seed) for number in range(3)]
    outcomes: Counter[str] = Counter()
    path = folder / "mutated.mcap"
    for case in range(first, first + count):
        rng = random.Random(f"{seed}/{case}")
        path.write_bytes(mutated(rng.choice(good), rng))
        with _case(f"recording {case} of seed {seed}"):
            outcomes[_read_recording(path, rng)] += 1
    return outcomes


def _messages(engine: SimulatedEngine) -> Iterator[TelemetryMessage]:
    yield engine.hello
    for _ in range(8):
        yield engine.snapshot()
        for _ in range(30):
            yield engine.advance()


def _read_message(data: bytes, snapshot: Snapshot) -> str:
    for decode in (wire.decode_telemetry, wire.decode_reply):
        try:
            message = decode(data, Unknowns())
        except UnknownMessage:
            return "unknown"
        except ProtocolError:
            continue
        return _apply(message, snapshot)
    return "refused"


def _apply(message: object, snapshot: Snapshot) -> str:
    mirror = Mirror()
    try:
        if isinstance(message, Snapshot):
            mirror.reset(message)
        elif isinstance(message, Frame):
            mirror.reset(snapshot)
            mirror.apply(coalesce([message]))
    except ProtocolError:
        return "read, refused by the mirror"
    return "read"


def _recording(folder: Path, number: int, seed: int) -> bytes:
    path = folder / f"good-{number}.mcap"
    engine = SimulatedEngine(num_blocks=60 + 90 * number, seed=seed + number)
    with RecordingWriter(path, keyframe_interval_ns=1_000_000) as writer:
        for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(40 + 80 * number))):
            writer.write(message, wait=True)
    return path.read_bytes()


def _read_recording(path: Path, rng: random.Random) -> str:
    try:
        recording = Recording.open(path)
    except BadInput as error:
        if "\n" in str(error):
            raise ValueError(f"a refusal of more than one line: {error}") from error
        return "refused"
    list(recording.messages(keyframes=True))
    at_s = rng.random() * recording.info.duration_s
    for seconds in (0.0, at_s, recording.info.duration_s, 1e12):
        recording.state_at(seconds)
    recording.snapshot_before(at_s)
    recording.memory_before(at_s, 1)
    recorded_requests(recording)
    return f"opened, {recording.damage_summary.partition(':')[0] or 'whole'}"


@contextmanager
def _case(name: str) -> Iterator[None]:
    """Name the case if it fails, and raise `Hang` if it takes too long."""

    def hangs(*_: object) -> None:
        raise Hang(f"longer than {CASE_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(CASE_S)
    try:
        yield
    except Exception as error:
        error.add_note(f"while reading {name}")
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _in_tenths(name: str, count: int, first: int, fuzz: Callable[[int, int], Counter[str]]) -> None:
    outcomes: Counter[str] = Counter()
    began_s, settled_kib = time.monotonic(), 0
    step = max(1, count // 10)
    for start in range(first, first + count, step):
        outcomes += fuzz(min(step, first + count - start), start)
        settled_kib = settled_kib or peak_resident_kib()
    grown_kib = peak_resident_kib() - settled_kib
    print(f"{name}: {sum(outcomes.values())} in {time.monotonic() - began_s:.0f} s, peak grew by {grown_kib} KiB")
    for outcome, number in outcomes.most_common():
        print(f"  {number:8} {outcome}")
    if grown_kib > MAX_GROWTH_KIB:
        raise SystemExit(f"{name}: memory grew by {grown_kib} KiB, at most {MAX_GROWTH_KIB} are accepted")


def main() -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(description="Mutate telemetry messages and recordings, and read them.")
    parser.add_argument("--messages", type=int, default=100_000, metavar="N", help="mutated messages to decode")
    parser.add_argument("--recordings", type=int, default=10_000, metavar="N", help="mutated recordings to open")
    parser.add_argument("--seed", type=int, default=2026, help="what all cases follow from")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first case")
    args = parser.parse_args()
    print(f"seed {args.seed}, from case {args.first}, Python {sys.version.split()[0]}")
    if args.messages:
        _in_tenths("messages", args.messages, args.first, lambda count, at: fuzz_messages(count, args.seed, at))
    if args.recordings:
        with tempfile.TemporaryDirectory() as folder:
            number = iter(range(1 << 30))

            def some(count: int, at: int) -> Counter[str]:
                place = Path(folder) / str(next(number))
                place.mkdir()
                return fuzz_recordings(count, args.seed, place, at)

            _in_tenths("recordings", args.recordings, args.first, some)


if __name__ == "__main__":
    main()
