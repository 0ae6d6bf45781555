"""Command `kvscope-engine sample`: publishes samples of this machine's devices on a socket, without an engine and
without torch.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvscope_engine.cli.arguments.sample_interval_option import add_interval_option
from kvscope_engine.cli.notices import print_notice
from kvscope_engine.server.device_publisher import DevicePublisher
from kvscope_telemetry.credentials.key_ring import KeyRing, default_keys_folder
from kvscope_telemetry.termination import handling_signals
from kvscope_telemetry.transport.bind_address import default_endpoint


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "sample",
        help="publish this machine's GPU, memory and CPU readings for the desktop",
        description="Publish this machine's GPU, memory and CPU readings until stopped, for engines that do not"
        " publish them (vLLM, SGLang). Watch them with `kvscope --attach ENDPOINT`.",
    )
    parser.add_argument(
        "--endpoint",
        metavar="ENDPOINT",
        help="where to listen: ipc:///DIR, or tcp://HOST:PORT, which also uses PORT + 1 (default: "
        f"{default_sample_endpoint()})",
    )
    access = parser.add_mutually_exclusive_group()
    access.add_argument(
        "--keys",
        type=Path,
        metavar="DIR",
        help=f"on tcp: folder of the keys (default: {default_keys_folder()}; see `kvscope-engine keys`)",
    )
    access.add_argument(
        "--keyless", action="store_true", help="on loopback tcp: require no key; every user of this machine may watch"
    )
    add_interval_option(parser, "--interval")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    endpoint = args.endpoint or default_sample_endpoint()
    keys = KeyRing(args.keys, warn=print_notice) if endpoint.startswith("tcp") and not args.keyless else None
    with (
        _stop_event_on_signals() as stopped,
        DevicePublisher(endpoint, keys=keys, interval_s=args.interval) as publisher,
    ):
        print(f"listening on {publisher.telemetry_endpoint}", flush=True)
        stopped.wait()
    return 0


def default_sample_endpoint() -> str:
    """Return the default endpoint of this command. It differs from an engine's default endpoint, so that this
    command and an engine can run at the same time.
    """
    return f"{default_endpoint()}/devices"


@contextmanager
def _stop_event_on_signals() -> Iterator[threading.Event]:
    stopped = threading.Event()
    with handling_signals(lambda *_: stopped.set()):
        yield stopped
