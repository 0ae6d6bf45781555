"""`python -m kvscope_telemetry.synthetic`: a synthetic engine on an endpoint, for the desktop and benchmarks.

Owns the command line alone. Ends after `--seconds`, at SIGTERM, or when its standard input closes with
`--until-eof`, so that a parent that dies takes it along.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import threading
from collections.abc import Sequence

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.synthetic.engine import SyntheticEngine
from kvscope_telemetry.synthetic.server import SyntheticServer


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the end; the exit code."""
    options = _parser().parse_args(arguments)
    epoch = options.epoch if options.epoch is not None else secrets.randbits(48)
    try:
        engine = SyntheticEngine(
            num_blocks=options.blocks,
            num_running=options.running,
            seed=options.seed,
            epoch=epoch,
            num_host_blocks=options.host_blocks,
            num_disk_blocks=options.disk_blocks,
        )
        server = SyntheticServer(engine, options.endpoint, rate=options.rate)
    except KvscopeError as error:
        print(f"kvscope-synthetic: {error}", file=sys.stderr)
        return error.exit_code
    print(f"serving {server.sockets.telemetry_endpoint}", flush=True)
    try:
        _wait(options)
    finally:
        server.close()
    print(f"published {engine.seq} frames, dropped {server.sockets.messages_dropped}", flush=True)
    return 0


def _wait(options: argparse.Namespace) -> None:
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    if options.until_eof:
        threading.Thread(target=_set_at_eof, args=(over,), daemon=True).start()
    over.wait(options.seconds)


def _set_at_eof(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvscope_telemetry.synthetic", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="ipc:///DIR or tcp://127.0.0.1:PORT")
    parser.add_argument("--blocks", type=int, default=4096, help="blocks of the pool (default 4096)")
    parser.add_argument("--host-blocks", type=int, default=0, help="places of a host tier (default 0: none)")
    parser.add_argument("--disk-blocks", type=int, default=0, help="places of a disk tier (default 0: none)")
    parser.add_argument("--rate", type=float, default=100.0, help="frames a second (default 100)")
    parser.add_argument("--running", type=int, default=32, help="requests that decode (default 32)")
    parser.add_argument("--seconds", type=float, default=None, help="how long (default: until SIGTERM)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default 0)")
    parser.add_argument("--epoch", type=int, default=None, help="of the engine start (default random)")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input closes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
