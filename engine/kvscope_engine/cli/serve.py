"""Command `kvscope-engine serve`: runs an engine on its sockets until a signal, a client or the parent process ends
it.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvscope_engine.cli.arguments.engine_options import add_engine_options, engine_config
from kvscope_engine.cli.arguments.sample_interval_option import add_interval_option
from kvscope_engine.cli.lazy_engine import engine_class
from kvscope_engine.cli.notices import print_notice, print_notices
from kvscope_engine.cli.other_ranks import run_as_follower, stop_when_rank_lost
from kvscope_engine.cli.signal_shutdown import STOP_S, stopped_by_signals
from kvscope_engine.cli.start_times import StartTimes
from kvscope_engine.command_parser import parse_int
from kvscope_engine.http.http_child import HttpChild, local_endpoint
from kvscope_engine.http.http_command import add_api_options, api_key
from kvscope_engine.model.loader.download.progress import IMPORT, TerminalProgress
from kvscope_engine.server.parent_watch import watch_parent
from kvscope_engine.server.served_engine import BuildEngine, MessagesDropped, OnProgress, Publish, ServedEngine
from kvscope_engine.server.service import EngineService
from kvscope_telemetry.credentials.key_ring import LOCAL_KEY, KeyRing, default_keys_folder
from kvscope_telemetry.devices.device_watch import SAMPLE_S
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import Hello, Progress
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.transport.bind_address import default_endpoint
from kvscope_telemetry.transport.connections import NO_KEY

if TYPE_CHECKING:
    from kvscope_engine.engine import Engine
    from kvscope_telemetry.recordings.engine_recorder import EngineRecorder

HTTP_VALUE_OPTIONS: Final = ("served_model_name", "tool_call_parser", "allowed_origins")
HTTP_FLAGS: Final = ("no_metrics", "metrics_open", "trust_forwarded")
"""Flags that are passed unchanged to the process of the OpenAI API. `HTTP_VALUE_OPTIONS` are the options with a
value that are passed as well.
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="run the engine as a server",
        description="Run the engine until it is stopped (Ctrl-C, SIGTERM, or a client with an operator's key).",
    )
    parser.add_argument(
        "--endpoint",
        metavar="ENDPOINT",
        help="where to listen: ipc:///DIR, or tcp://HOST:PORT for telemetry with commands on PORT + 1 (default: "
        f"{default_endpoint()})",
    )
    access = parser.add_mutually_exclusive_group()
    access.add_argument(
        "--keys",
        type=Path,
        metavar="DIR",
        help="on tcp: folder with the engine's key and the keys allowed to connect; created if missing (default: "
        f"{default_keys_folder()}; see `kvscope-engine keys`)",
    )
    access.add_argument(
        "--keyless",
        choices=[str(role) for role in Role],
        help="on loopback tcp: require no key, and give every user of this machine this role",
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="also serve the OpenAI API there, from a separate process (see `kvscope-engine http --help`); "
        "needs an API key if HOST is not loopback",
    )
    add_api_options(parser)
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE.mcap",
        help="record all telemetry into a new file (FILE.mcap.part while recording); `kvscope --open FILE.mcap` "
        "plays it",
    )
    parser.add_argument(
        "--record-text",
        action="store_true",
        help="with --record: include the text of blocks, so that the file contains prompts and answers",
    )
    add_interval_option(parser, "--sample-interval")
    parser.add_argument(
        "--stop-timeout",
        type=_stop_seconds,
        default=STOP_S,
        metavar="SECONDS",
        help=f"hard limit in seconds from SIGTERM, SIGHUP or Ctrl-C to the end of the process (default: {STOP_S:g})",
    )
    parser.add_argument(
        "--exit-with-parent",
        nargs="?",
        type=parse_int,
        const=0,
        metavar="PID",
        help="stop when the process that started the engine ends; give its PID to also notice that it has already "
        "ended",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    if (code := run_as_follower(config)) is not None:
        return code
    if args.record_text and args.record is None:
        raise BadInput("--record-text needs --record FILE.mcap")
    if args.exit_with_parent is not None:
        watch_parent(args.exit_with_parent or None)

    http = _http_child(args)
    built: list[Engine] = []
    num_printed = 0

    def report_notice(note: str) -> None:
        nonlocal num_printed
        num_printed += 1
        print_notice(note)

    def build(progress: OnProgress, publish: Publish, messages_dropped: MessagesDropped) -> ServedEngine:
        # Torch is imported here, after the sockets are up.
        nonlocal num_printed
        engine = engine_class()(
            config, progress=progress, publish=publish, messages_dropped=messages_dropped, on_note=report_notice
        )
        built.append(engine)
        stop_when_rank_lost(engine)
        print_notices([line for line in (engine.weights, engine.hello.device.attention, engine.memory_plan) if line])
        print_notices(engine.notes)
        num_printed = len(engine.notes)
        return engine

    report_progress = StartTimes(TerminalProgress()) if args.debug else TerminalProgress()
    report_progress(Progress(stage=IMPORT))
    try:
        endpoint = args.endpoint or default_endpoint()
        return serve(
            endpoint,
            build,
            keys=args.keys,
            keyless=args.keyless,
            on_progress=report_progress,
            record=args.record,
            record_text=args.record_text,
            http=http,
            sample_s=args.sample_interval,
            stop_s=args.stop_timeout,
        )
    finally:
        if http is not None:
            http.close()
        print_notices([note for engine in built for note in engine.notes[num_printed:]])


def serve(
    endpoint: str,
    build: BuildEngine,
    *,
    keys: Path | None = None,
    keyless: str | None = None,
    on_progress: OnProgress = lambda progress: None,
    record: Path | None = None,
    record_text: bool = False,
    http: HttpChild | None = None,
    sample_s: float = SAMPLE_S,
    stop_s: float = STOP_S,
) -> int:
    """Serve the engine returned by `build` until it is stopped. Returns 0; raises the error that ended the engine.

    Args:
        endpoint: ZeroMQ endpoint to listen on.
        build: Loads the engine.
        keys: On tcp: folder of the keys.
        keyless: On loopback tcp: role of all users of this machine, in place of keys.
        on_progress: Called with the progress of loading.
        record: File in which all telemetry is recorded.
        record_text: Whether the texts of blocks are recorded as well.
        http: OpenAI API to run in addition.
        sample_s: Seconds between two samples of the devices.
        stop_s: Maximum seconds from a signal to the end of the process.
    """
    started_s = time.monotonic()

    def report_ready(hello: Hello) -> None:
        cache = hello.cache
        blocks = f"{cache.num_blocks} blocks of {cache.block_size} tokens"
        endpoint_text, took_s = service.telemetry_endpoint, time.monotonic() - started_s
        print_line(f"ready: {hello.model.name} on {endpoint_text}, {blocks}, after {took_s:.1f} s")

    ring = KeyRing(keys, warn=print_notice) if endpoint.startswith("tcp") and keyless is None else None
    with stopped_by_signals(stop_s) as stopping, _recorder(record, texts=record_text) as recorder:
        stopping.set_recorder(recorder)
        service = EngineService(
            endpoint,
            build,
            keys=ring,
            keyless=Role(keyless or Role.VIEWER),
            on_progress=on_progress,
            interrupt=lambda: os.kill(os.getpid(), signal.SIGTERM),
            recorder=recorder,
            sample_s=sample_s,
            on_ready=report_ready,
        )
        stopping.set_service(service)
        print(f"listening on {service.telemetry_endpoint}, loading the model", flush=True)
        key = ring.folder / LOCAL_KEY if ring is not None else NO_KEY
        http_context = nullcontext() if http is None else http.running(local_endpoint(service.telemetry_endpoint), key)
        with http_context:
            service.run()
    if stopping.was_loading:
        recorded = "" if record is None else f", and nothing is recorded: there is no {str(record)!r}"
        print_notices([f"stopped before the model was loaded{recorded}"])
    return 0


def _stop_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: must be 1 to 3600 seconds")
    return seconds


def _http_child(args: argparse.Namespace) -> HttpChild | None:
    if args.http is None:
        if args.api_key is not None or any(getattr(args, name) for name in (*HTTP_VALUE_OPTIONS, *HTTP_FLAGS)):
            option_names = ("api-key", *(name.replace("_", "-") for name in (*HTTP_VALUE_OPTIONS, *HTTP_FLAGS)))
            names = ", ".join(f"--{option}" for option in option_names)
            raise BadInput(f"{names} need --http HOST:PORT")
        return None
    if args.keyless == Role.VIEWER:
        raise BadInput("--http is not accepted with --keyless viewer: it sends prompts, which only operators may")
    options = [f"--{name.replace('_', '-')}={value}" for name in HTTP_VALUE_OPTIONS if (value := getattr(args, name))]
    options += [f"--{name.replace('_', '-')}" for name in HTTP_FLAGS if getattr(args, name)]
    return HttpChild(args.http, api_key=api_key(args), options=options, report=lambda line: print_notices([line]))


def _recorder(path: Path | None, *, texts: bool) -> AbstractContextManager[EngineRecorder | None]:
    if path is None:
        return nullcontext()
    from kvscope_telemetry.recordings.engine_recorder import EngineRecorder

    return EngineRecorder(path, lambda line: print_notices([line]), texts=texts)
