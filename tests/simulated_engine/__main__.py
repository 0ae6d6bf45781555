"""A simulated engine that serves on an endpoint as its own process.

It ends after `--seconds`, at SIGTERM, when a client shuts it down, or with `--until-eof` when its standard input
closes, so that it ends with its parent.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import threading
import time
from collections.abc import Callable

from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.termination import handling_signals


def main() -> None:
    """Serve until the end, and exit."""
    options = _parser().parse_args()
    epoch = options.epoch if options.epoch is not None else secrets.randbits(48)
    try:
        engine = SimulatedEngine(
            num_blocks=options.blocks,
            num_running=options.running,
            seed=options.seed,
            epoch=epoch,
            num_host_blocks=options.host_blocks,
            num_disk_blocks=options.disk_blocks,
        )
        server = SimulatedServer(engine, options.endpoint, rate=options.rate)
    except KvscopeError as error:
        print(f"simulated engine: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"serving {server.sockets.telemetry_endpoint}", flush=True)
    try:
        _wait(options, server)
    finally:
        server.close()
    print(f"published {engine.seq} frames, dropped {server.sockets.messages_dropped}", flush=True)


def _wait(options: argparse.Namespace, server: SimulatedServer) -> None:
    over = threading.Event()
    if options.until_eof:
        threading.Thread(target=_at_end_of_input, args=(over.set,), daemon=True).start()
    until_s = None if options.seconds is None else time.monotonic() + options.seconds
    with handling_signals(lambda *_: over.set()):
        while not over.wait(0.05) and not server.wait(0) and (until_s is None or time.monotonic() < until_s):
            pass


def _at_end_of_input(then: Callable[[], None]) -> None:
    sys.stdin.read()
    then()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.simulated_engine", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="ipc:///DIR or tcp://127.0.0.1:PORT")
    parser.add_argument("--blocks", type=int, default=4096, help="blocks of the pool (default 4096)")
    parser.add_argument("--host-blocks", type=int, default=0, help="blocks of host memory (default 0: none)")
    parser.add_argument("--disk-blocks", type=int, default=0, help="blocks on disk (default 0: none)")
    parser.add_argument("--rate", type=float, default=100.0, help="steps a second (default 100)")
    parser.add_argument("--running", type=int, default=32, help="requests that decode (default 32)")
    parser.add_argument("--seconds", type=float, default=None, help="how long (default: until SIGTERM)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default 0)")
    parser.add_argument("--epoch", type=int, default=None, help="of the engine start (default random)")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input closes")
    return parser


if __name__ == "__main__":
    main()
