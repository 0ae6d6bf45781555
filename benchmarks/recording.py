"""Measure the size of a recording of hours, and how quickly it opens and seeks.

    python -m benchmarks.recording --seconds 3600 --blocks 100000 --rate 200 [--keep hour.mcap]
    python -m benchmarks.recording --seconds 300 --rate 30 200 1000     seeks at three rates
    python -m benchmarks.recording --seconds 600 7200 --rate 200        memory of ten minutes and of two hours
    python -m benchmarks.recording --open hour.mcap

A simulated engine with a simulated clock writes the recordings (an hour takes some minutes), and each is measured in a
new process: size per minute by kind of data; opening, and reading the overview of all seconds; seeks to random times as
the window does them, on the open recording and on one that was just opened; the history of a block, and saving; memory
meanwhile. Times are wall time and, for machines with other load, processor time.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import zstandard
from tests.simulated_engine.engine import SimulatedEngine

from benchmarks.command_line import run_benchmark
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import MemoryBreakdown
from kvscope_telemetry.playback.playback_reader import PlaybackReader
from kvscope_telemetry.recordings.block_history import read_part
from kvscope_telemetry.recordings.chunks import MAGIC, read_chunk
from kvscope_telemetry.recordings.layout import SCHEMAS, TOPICS
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.read_budget import ReadBudget
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.save import save
from kvscope_telemetry.recordings.survey import Surveyor
from kvscope_telemetry.recordings.writer import RecordingWriter

_Result = TypeVar("_Result")
_COLUMN_TITLES = {
    "hashes": "hashes (random: no fewer bytes)",
    "blocks.hash": "where hashes and parents are from",
    "blocks.parent": "where hashes and parents are from",
    "blocks": "which blocks",
    "blocks.ids": "which blocks",
    "new_requests": "requests that came, events",
    "requests_info": "requests that came, events",
    "events": "requests that came, events",
}
"""Title in the printed table by the name of a column. Columns that are missing here are counted under a title
for their table.
"""
Sizes = Mapping[str, Mapping[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=int, nargs="+", default=[3600])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rate", type=int, nargs="+", default=[200], help="frames per second")
    parser.add_argument("--running", type=int, default=32, help="requests that decode")
    parser.add_argument("--keep", type=Path, metavar="FILE.mcap", help="do not throw the recording away")
    parser.add_argument("--open", type=Path, metavar="FILE.mcap", help="measure this one")
    parser.add_argument("--jumps", type=int, default=200)


def run(args: argparse.Namespace) -> int:
    if args.open is not None:
        measure(args.open, args.jumps)
        return 0
    if args.keep is not None and len(args.seconds) * len(args.rate) > 1:
        raise BadInput("--keep FILE.mcap is not accepted with several lengths or rates: give one of each")
    results = [_record_and_measure(seconds, rate, args) for rate in args.rate for seconds in args.seconds]
    return max(results)


def _record_and_measure(seconds: int, rate: int, args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        path = args.keep or Path(folder) / "made.mcap"
        write_recording(path, seconds, rate, args)
        print(f"{seconds} s at {rate} frames/s, {args.blocks:,} blocks", flush=True)
        return subprocess.call(
            [sys.executable, "-m", "benchmarks.recording", "--open", str(path), "--jumps", str(args.jumps)]
        )


def write_recording(path: Path, seconds: int, rate: int, args: argparse.Namespace) -> None:
    """Write a recording of evenly spaced steps, with a memory breakdown and a heartbeat each second, as a real
    engine publishes them.
    """
    now_ns, step_ns = 1_000_000_000, round(1e9 / rate)
    engine = SimulatedEngine(num_blocks=args.blocks, num_running=args.running, clock=lambda: now_ns)
    epoch = engine.hello.epoch
    with RecordingWriter(path) as writer:
        writer.write(engine.snapshot(), wait=True)
        for step in range(seconds * rate):
            now_ns += step_ns
            writer.write(engine.advance(), wait=True)
            engine.outputs.clear()
            if step % rate == 0:
                writer.write(MemoryBreakdown(epoch=epoch, time_ns=now_ns, kv_bytes=1 << 30), wait=True)
                writer.write(engine.heartbeat(), wait=True)


def measure(path: Path, num_jumps: int) -> None:
    before_mib = resident_mib()
    recording, opened = timed(lambda: Recording.open(path))
    overview, read = timed(lambda: read_overview(recording))
    minutes = recording.info.duration_s / 60
    print(f"{minutes:.1f} minutes, {recording.info.num_frames:,} frames, {len(overview.events):,} events")
    print(f"size        {path.stat().st_size / 1e6:.1f} MB, {path.stat().st_size / 1e6 / minutes:.2f} MB a minute")
    print(f"opened      {opened}")
    print(f"its overview  {read}, {len(overview):,} seconds")
    opened_mib = resident_mib()
    _measure_jumps("jumps       ", (recording for _ in range(num_jumps)))
    jumped_mib = resident_mib()
    _measure_jumps("first ones  ", (Recording.open(path) for _ in range(num_jumps // 4)))
    _measure_waits(recording)
    _play(recording)
    print(
        f"memory      {before_mib:.0f} MiB before, {opened_mib:.0f} with its overview, {jumped_mib:.0f} after jumps"
        f", {resident_mib():.0f} after a block's life, saving and a minute played"
    )
    print_table(recorded_bytes(recording), minutes)


def _measure_jumps(name: str, recordings: Iterable[Recording]) -> None:
    """Seek to a random time once in each of `recordings`, which are the same open recording or newly opened ones."""
    random_times = random.Random(1)
    walls, processors = [], []
    for recording in recordings:
        reader = PlaybackReader(recording)
        at_ns = round(random_times.uniform(0.0, recording.info.duration_s) * 1e9)
        wall_s, processor_s = time.perf_counter(), time.process_time()
        assert reader.jump(at_ns), "there is a state"
        walls.append(1e3 * (time.perf_counter() - wall_s))
        processors.append(1e3 * (time.process_time() - processor_s))
    for clock, times in (("wall", walls), ("processor", processors)):
        p50, p95, maximum = np.quantile(times, (0.5, 0.95, 1.0))
        print(f"{name}p50 {p50:.1f}, p95 {p95:.1f}, at most {maximum:.1f} ms ({clock})")


def _measure_waits(recording: Recording) -> None:
    cache, end_ns = recording.info.hello.cache, recording.end_ns
    for minutes in (1, 10):
        from_ns = max(recording.start_ns, end_ns - minutes * 60_000_000_000)
        _, took = timed(partial(read_part, recording, cache.num_blocks // 3, from_ns, end_ns, cache.block_size))
        print(f"block's life {(end_ns - from_ns) / 60e9:.1f} minutes: {took}")
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        for from_s in sorted({max(0.0, recording.info.duration_s - 120), 0.0}, reverse=True):  # one for a short one
            path = Path(folder) / f"{from_s:.0f}.mcap"
            _, took = timed(partial(save, recording, path, from_s))
            length_s, num_bytes = recording.info.duration_s - from_s, path.stat().st_size
            print(f"saved       {length_s / 60:.1f} minutes: {took}, {num_bytes / 1e6:.1f} MB")


def _play(recording: Recording) -> None:
    reader = PlaybackReader(recording)
    length_ns = round(recording.info.duration_s * 1e9)
    from_ns = max(0, length_ns - 60_000_000_000)
    reader.jump(from_ns)
    _, took = timed(lambda: [len(reader.read_until(at_ns)) for at_ns in range(from_ns, length_ns, 100_000_000)])
    print(f"played      {(length_ns - from_ns) / 1e9:.0f} s: {took}")


def timed(work: Callable[[], _Result]) -> tuple[_Result, str]:
    """Return the result of `work`, and a text of its wall and processor time."""
    wall_s, processor_s = time.perf_counter(), time.process_time()
    result = work()
    return result, f"{time.perf_counter() - wall_s:.3f} s ({time.process_time() - processor_s:.3f} s of the processor)"


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)


def recorded_bytes(recording: Recording) -> Sizes:
    """Return the number of bytes in the file by topic, and by column title within each topic.

    A message of columns is compressed as a whole. Here each column is compressed separately, and the bytes of a message
    are divided among its columns in proportion, as the bytes of a chunk are divided among its messages.
    """
    sizes_by_topic: dict[str, dict[str, float]] = {}
    surveyor = Surveyor()
    with recording.path.open("rb") as file:
        file.seek(len(MAGIC))
        chunks = surveyor.run(file, ReadBudget(recording.path.stat().st_size))
        kinds = {surveyor.found.channels[kind]: kind for kind in TOPICS}
        for chunk in chunks:
            messages = read_chunk(file, chunk)
            total = max(sum(len(message.data) for message in messages), 1)
            for message in messages:
                kind = kinds[message.channel]
                parts = (
                    dict(_column_sizes(message.data)) if SCHEMAS.get(kind, ("", ""))[1] == "zstd+msgpack" else {"": 1}
                )
                share = chunk.stored_bytes * len(message.data) / total / max(sum(parts.values()), 1)
                sizes = sizes_by_topic.setdefault(TOPICS[kind].rpartition("/")[2], {})
                for name, size in parts.items():
                    sizes[_column_title(name)] = sizes.get(_column_title(name), 0.0) + size * share
    return sizes_by_topic


def print_table(sizes: Sizes, minutes: float) -> None:
    """Print the sizes in MB per minute, largest first."""
    for name, parts in sorted(sizes.items(), key=lambda item: -sum(item[1].values())):
        print(f"  {name:<11} {sum(parts.values()) / 1e6 / minutes:6.3f} MB a minute")
        for part, size in sorted(parts.items(), key=lambda item: -item[1]):
            if part:
                print(f"  {size / 1e6 / minutes:18.3f} {part}")
    hash_bytes = sum(size for parts in sizes.values() for part, size in parts.items() if part.startswith("hashes"))
    print(f"  hashes alone are {hash_bytes / 1e6 / minutes:.3f} MB a minute")


def _column_sizes(data: bytes) -> Iterator[tuple[str, int]]:
    for name, (_, column) in msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data))["columns"].items():
        yield name, len(zstandard.compress(column)) if len(column) > 64 else len(column)


def _column_title(column: str) -> str:
    name = column.rstrip("#")
    table = name.partition(".")[0]
    if not name or name in _COLUMN_TITLES:
        return _COLUMN_TITLES.get(name, "")
    if table in ("requests", "batch", "moves"):
        return "requests, who ran, what moved"
    return "what else changed of blocks" if table == "blocks" else "times, counters"


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
