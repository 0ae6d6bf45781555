"""What it costs a desktop to keep its past: the processor's time of following an engine, with a ring and without.

    python scripts/bench_ring.py --blocks 100000 --rate 200 --rounds 6

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

from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.timeline.ring import Ring

SETTLE_S = 3.0
"""After each turn: a ring begins with the whole state."""
FRAME_S = 1 / 60


def main() -> int:
    """Measure and print; 1 when it is over 2 % of a core."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=200.0, help="frames a second")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    args = parser.parse_args()
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
    return int(cost > 2.0)


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


def _follow(source: LiveSource, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        source.update_mirror()
        time.sleep(FRAME_S)


if __name__ == "__main__":
    sys.exit(main())
