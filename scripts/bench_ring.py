"""What it costs a desktop to keep its past: the processor's time of following an engine, with a ring and without.

    python scripts/bench_ring.py --blocks 100000 --rate 200 --rounds 6
    python scripts/bench_ring.py --memory --rate 30     memory after ten minutes and two hours, on a clock of its own

A synthetic engine in another process, real sockets, one process that follows as the desktop does (its mirror applied 60
times a second). With and without take turns, who begins as well; the cost is the median of the pairs' differences.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import Summary, TimedEvent
from kvscope_telemetry.synthetic.engine import SyntheticEngine
from kvscope_telemetry.timeline.ring import Ring

SETTLE_S = 3.0
"""After each turn: a ring begins with the whole state."""
FRAME_S = 1 / 60
MAX_COST = 4.0
"""Percent of a core, at 200 frames/s with 100,000 blocks: what a desktop that is left open may take beside its
window."""


def main() -> int:
    """Measure and print; 1 when it is over `MAX_COST`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=200.0, help="frames per second")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    parser.add_argument("--memory", action="store_true", help="what a ring takes of memory, not of a core")
    args = parser.parse_args()
    if args.memory:
        _measure_memory(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="kvscope-ring-") as folder:
        (Path(folder) / "engine").mkdir(mode=0o700)
        endpoint = f"ipc://{folder}/engine/telemetry"
        command = [sys.executable, "-m", "kvscope_telemetry.synthetic", "--endpoint", endpoint, "--until-eof"]
        command += ["--blocks", str(args.blocks), "--rate", str(args.rate)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
            assert engine.stdin is not None
            assert engine.stdout is not None
            engine.stdout.readline()
            with LiveSource(endpoint) as source:
                costs = [_pair(source, Path(folder), args, turn) for turn in range(args.rounds)]
            engine.stdin.close()
            engine.wait()
    cost = statistics.median(with_ring - without for with_ring, without, _ in costs)
    for with_ring, without, rate in costs:
        print(f"with {with_ring:5.2f} %, without {without:5.2f} % of a core, at {rate:.0f} frames/s")
    print(f"the ring costs {cost:.2f} % of a core")
    return int(cost > MAX_COST)


def _pair(source: LiveSource, folder: Path, args: argparse.Namespace, turn: int) -> tuple[float, float, float]:
    found = {}
    for has_ring in (True, False) if turn % 2 else (False, True):
        ring = Ring(folder / f"ring-{turn}") if has_ring else None
        source.set_sink(ring)
        _follow(source, SETTLE_S)
        frames, wall_s, processor_s = source.status.frames_received, time.monotonic(), time.process_time()
        _follow(source, args.seconds)
        lasted_s = time.monotonic() - wall_s
        found[has_ring] = 100 * (time.process_time() - processor_s) / lasted_s
        rate = (source.status.frames_received - frames) / lasted_s
        source.set_sink(None)
        if ring is not None:
            ring.close()
    return found[True], found[False], rate


def _measure_memory(args: argparse.Namespace) -> None:
    """As a desktop: it keeps the overview of what the ring has, and a mirror."""
    now_ns, minute_steps = 1_000_000_000, round(60 * args.rate)
    engine = SyntheticEngine(num_blocks=args.blocks, num_running=32, clock=lambda: now_ns)
    overview, follower = SessionOverview(), Follower()
    with tempfile.TemporaryDirectory(prefix="kvscope-ring-") as folder:
        ring = Ring(Path(folder) / "ring")
        messages: list[Frame | Snapshot] = [engine.snapshot()]
        for minute in range(121):
            for message in messages:
                ring.write(message, wait=True)
                follower.feed(message)
            _keep_overview(ring, overview)
            if minute in (1, 10, 60, 120):
                on_disk = ring.num_bytes / 1e6
                print(
                    f"after {minute:3} minutes {_resident_mib():.0f} MiB, ring {on_disk:.0f} MB on the disk", flush=True
                )
            messages = []
            for _ in range(minute_steps):
                now_ns += round(1e9 / args.rate)
                messages.append(engine.advance())
                engine.outputs.clear()
        ring.close()


def _keep_overview(ring: Ring, overview: SessionOverview) -> None:
    ring.flush(60.0)
    fresh = ring.take_overview()
    overview.extend(
        [each for each in fresh if isinstance(each, Summary)], [e for e in fresh if isinstance(e, TimedEvent)]
    )
    if ring.start_ns is not None:
        overview.forget_before(ring.start_ns)


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)


def _follow(source: LiveSource, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        source.update_mirror()
        time.sleep(FRAME_S)


if __name__ == "__main__":
    sys.exit(main())
