"""What a recording of hours weighs, and how quickly it opens and is gone about in.

    python scripts/bench_recording.py --seconds 3600 --blocks 100000 --rate 200 [--keep hour.mcap]
    python scripts/bench_recording.py --open hour.mcap

Makes one by a synthetic engine on a clock of its own (an hour takes some minutes), then measures in a fresh process:
size a minute and what it is made of; opening, and the course of all seconds; jumps to random moments as the window
makes them; memory after it all. Times are of the wall and, for machines that others use too, of the processor.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvscope_telemetry.messages.telemetry import MemoryBreakdown
from kvscope_telemetry.playback.playback_reader import PlaybackReader
from kvscope_telemetry.recordings.layout import TOPICS
from kvscope_telemetry.recordings.overview import read_course
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.synthetic.engine import SyntheticEngine

_Made = TypeVar("_Made")


def main() -> int:
    """Make and measure, or measure what is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rate", type=int, default=200, help="frames a second")
    parser.add_argument("--running", type=int, default=32, help="requests that decode")
    parser.add_argument("--keep", type=Path, metavar="FILE.mcap", help="do not throw the recording away")
    parser.add_argument("--open", type=Path, metavar="FILE.mcap", help="measure this one")
    parser.add_argument("--jumps", type=int, default=200)
    args = parser.parse_args()
    if args.open is not None:
        measure(args.open, args.jumps)
        return 0
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        path = args.keep or Path(folder) / "made.mcap"
        make(path, args)
        return subprocess.call([sys.executable, __file__, "--open", str(path), "--jumps", str(args.jumps)])


def make(path: Path, args: argparse.Namespace) -> None:
    """Steps come as evenly as a clock's ticks; the engine says where its memory went once a second, as real ones do."""
    now_ns, step_ns = 1_000_000_000, round(1e9 / args.rate)
    engine = SyntheticEngine(num_blocks=args.blocks, num_running=args.running, clock=lambda: now_ns)
    epoch = engine.hello.epoch
    with RecordingWriter(path) as writer:
        writer.write(engine.snapshot(), wait=True)
        for step in range(args.seconds * args.rate):
            now_ns += step_ns
            writer.write(engine.advance(), wait=True)
            engine.outputs.clear()
            if step % args.rate == 0:
                writer.write(MemoryBreakdown(epoch=epoch, time_ns=now_ns, kv_bytes=1 << 30), wait=True)
                writer.write(engine.heartbeat(), wait=True)


def measure(path: Path, num_jumps: int) -> None:
    """Print what was found."""
    before_mib = resident_mib()
    recording, opened = timed(lambda: Recording.open(path))
    course, read = timed(lambda: read_course(recording))
    minutes = recording.info.duration_s / 60
    print(f"{minutes:.1f} minutes, {recording.info.num_frames:,} frames, {len(course.events):,} events")
    print(f"size        {path.stat().st_size / 1e6:.1f} MB, {path.stat().st_size / 1e6 / minutes:.2f} MB a minute")
    for topic, num_bytes in stored(recording).most_common():
        print(f"  {topic:<20} {num_bytes / 1e6 / minutes:.2f} MB a minute")
    print(f"opened      {opened}")
    print(f"its course  {read}, {len(course):,} seconds")
    reader, moments = PlaybackReader(recording), random.Random(1)
    walls, processors = [], []
    for _ in range(num_jumps):
        at_ns = round(moments.uniform(0.0, recording.info.duration_s) * 1e9)
        wall_s, processor_s = time.perf_counter(), time.process_time()
        assert reader.jump(at_ns, with_past=False), "there is a state"
        walls.append(1e3 * (time.perf_counter() - wall_s))
        processors.append(1e3 * (time.process_time() - processor_s))
    for name, times in (("wall", walls), ("processor", processors)):
        p50, p95, most = np.quantile(times, (0.5, 0.95, 1.0))
        print(f"jumps       p50 {p50:.1f}, p95 {p95:.1f}, at most {most:.1f} ms ({name})")
    print(f"memory      {before_mib:.0f} MiB before, {resident_mib():.0f} MiB after")


def stored(recording: Recording) -> Counter[str]:
    """Bytes in the file a channel, by that which most of each chunk is of."""
    found: Counter[str] = Counter()
    chunks = recording._chunks
    topics = {chunks.found.channels[kind]: topic for kind, topic in TOPICS.items()}
    for chunk in chunks.found.chunks:
        found[topics[max(chunk.counts, key=chunk.counts.__getitem__)]] += chunk.stored_bytes
    return found


def timed(make_it: Callable[[], _Made]) -> tuple[_Made, str]:
    """What it made, and how long that took."""
    wall_s, processor_s = time.perf_counter(), time.process_time()
    made = make_it()
    return made, f"{time.perf_counter() - wall_s:.3f} s ({time.process_time() - processor_s:.3f} s of the processor)"


def resident_mib() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
