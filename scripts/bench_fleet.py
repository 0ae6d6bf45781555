"""What it costs to watch many engines: CPU and memory of the fleet's one reader, and of as many sources with mirrors.

    python scripts/bench_fleet.py --engines 100 --rate 20 --seconds 20

The engines are synthetic, all in another process; each reader runs in a process of its own, on the same engines.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time

from kvscope_telemetry.addresses import Address
from kvscope_telemetry.fleet.entries import FleetEntry
from kvscope_telemetry.sockets.file_limit import raise_file_limit

WARM_S = 5.0


def main() -> None:
    """Both readers in turn; a line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--rate", type=float, default=20.0, help="frames a second of each")
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=("all", "serve", "fleet", "sources"), default="all", help=argparse.SUPPRESS)
    args = parser.parse_args()
    raise_file_limit()
    if args.role == "all":
        _all(args)
    elif args.role == "serve":
        _serve(args)
    else:
        print(json.dumps(_measure(args)), flush=True)


def _all(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        again = [sys.executable, __file__, "--folder", folder]
        for name in ("engines", "rate", "blocks", "seconds"):
            again += [f"--{name}", str(getattr(args, name))]
        with subprocess.Popen([*again, "--role", "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engines:
            assert engines.stdin is not None
            assert engines.stdout is not None
            engines.stdout.readline()
            for role in ("fleet", "sources"):
                subprocess.run([*again, "--role", role], check=True)
            engines.stdin.close()


def _addresses(args: argparse.Namespace) -> list[str]:
    return [f"ipc://{args.folder}/{number}/telemetry" for number in range(args.engines)]


def _serve(args: argparse.Namespace) -> None:
    from kvscope_telemetry.synthetic.engine import SyntheticEngine
    from kvscope_telemetry.synthetic.server import SyntheticServer

    servers = [
        SyntheticServer(
            SyntheticEngine(num_blocks=args.blocks, num_running=16, epoch=number + 1, seed=number), address,
            rate=args.rate,
        )
        for number, address in enumerate(_addresses(args))
    ]  # fmt: skip
    print("serving", flush=True)
    sys.stdin.read()
    for server in servers:
        server.close()


def _measure(args: argparse.Namespace) -> dict[str, object]:
    rss_before = _rss_bytes()
    (in_sync, num_frames, turn, close) = _fleet(args) if args.role == "fleet" else _sources(args)
    until = time.monotonic() + 120
    while not in_sync() and time.monotonic() < until:
        turn()
        time.sleep(0.1)
    _turn_for(WARM_S, turn)
    begun_s, cpu_s, frames = time.monotonic(), _cpu_s(), num_frames()
    _turn_for(args.seconds, turn)
    took_s = time.monotonic() - begun_s
    figures = {
        "reader": args.role,
        "engines": args.engines,
        "all_live": in_sync(),
        "frames_per_s": round((num_frames() - frames) / took_s),
        "cpu_share_of_a_core": round((_cpu_s() - cpu_s) / took_s, 3),
        "rss_mb_more": round((_rss_bytes() - rss_before) / 1e6, 1),
        "threads": _num_threads(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "python_threads": threading.active_count(),
    }
    close()
    return figures


def _turn_for(seconds: float, turn) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        turn()
        time.sleep(0.2)


def _fleet(args):  # type: ignore[no-untyped-def]
    from kvscope_telemetry.fleet.fleet import Fleet

    fleet = Fleet()
    fleet.watch([FleetEntry(Address(text)) for text in _addresses(args)])
    frames = lambda: sum(m._reader.status().frames_received for m in list(fleet._members.values()))  # noqa: E731
    is_live = lambda: len(fleet.rows) == args.engines and all(r.state == "live" for r in fleet.rows)  # noqa: E731
    return is_live, frames, lambda: None, fleet.close


def _sources(args):  # type: ignore[no-untyped-def]
    sources = [Address(text).open() for text in _addresses(args)]

    def turn() -> None:
        for source in sources:
            source.update_mirror()

    def close() -> None:
        for source in sources:
            source.close()

    frames = lambda: sum(source.status.frames_received for source in sources)  # noqa: E731
    return lambda: all(s.status.state == "live" for s in sources), frames, turn, close


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    main()
