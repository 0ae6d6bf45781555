"""Command `kvscope-engine http ENDPOINT`: the OpenAI-compatible API for a running engine."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvscope_engine.command_parser import parse_int, parse_size
from kvscope_engine.http.listen_address import listen, listener_url
from kvscope_engine.http.tool_calling.tool_call_formats import FORMATS_BY_NAME
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from kvscope_engine.http.api_state import HttpSettings

API_KEY_VARIABLE: Final = "KVSCOPE_API_KEY"
MAX_API_KEY: Final = 4096
ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._\[\]:-]+")
ABOUT: Final = (
    "Serve OpenAI's API for the engine at ENDPOINT, from a separate process: /v1/models, /v1/completions,"
    " /v1/chat/completions (streaming, usage, logprobs, tools, response_format), /tokenize, /detokenize, /health,"
    " /version, /metrics (Prometheus) and /openapi.json. The engine may start later and restart; meanwhile, requests"
    " get HTTP 503. `kvscope-engine serve --http HOST:PORT` starts the API together with an engine. SIGTERM and SIGHUP"
    " let running requests finish."
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "http", help="serve the OpenAI API for a running engine", description=ABOUT
    )
    parser.add_argument("endpoint", metavar="ENDPOINT", help="the engine's endpoint: ipc:///DIR or tcp://HOST:PORT")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:8000",
        help="address to listen on; beyond loopback an API key is required; port 0: any free port",
    )
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="on tcp: an operator's key file for the engine, or `none`"
    )
    add_api_options(parser)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of the model's tokenizer (default: found by the model's name; if there is none, the"
        " engine tokenizes)",
    )
    parser.add_argument(
        "--max-requests",
        type=parse_int,
        default=1024,
        help="maximum concurrent requests; more get HTTP 429 (clients with few requests may use an eighth more)",
    )
    parser.add_argument(
        "--max-connections",
        type=parse_int,
        default=16_384,
        help="maximum open connections; more get HTTP 503; lower if the limit on open files (ulimit -n) is lower",
    )
    parser.add_argument(
        "--max-body", type=parse_size, default="16MiB", metavar="SIZE", help="maximum size of a request's body"
    )
    parser.add_argument(
        "--drain-seconds",
        type=parse_int,
        default=30,
        metavar="S",
        help="seconds in which requests in progress can finish at shutdown",
    )
    parser.add_argument("--listen-fd", type=parse_int, help=argparse.SUPPRESS)
    parser.add_argument("--exit-with-parent", type=parse_int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)
    return parser


def add_api_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY[,KEY]",
        help="API key that clients must send (Authorization: Bearer KEY), or several: each key then counts as a "
        f"client of its own; visible in the process list, unlike the variable {API_KEY_VARIABLE}",
    )
    parser.add_argument(
        "--trust-forwarded",
        action="store_true",
        help="behind a proxy: identify clients by the last address of X-Forwarded-For (default: by the "
        "connection's address, so everyone behind a proxy is one client)",
    )
    parser.add_argument(
        "--allowed-origins",
        type=origins,
        metavar="ORIGIN[,ORIGIN]",
        help="web pages that may use the API from a browser (CORS), such as https://chat.example, or * for all "
        "(default: none)",
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="model name for clients (default: as --model)")
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        choices=sorted(FORMATS_BY_NAME),
        help="format in which the model writes tool calls (default: detected from its chat template):"
        f" {', '.join(FORMATS_BY_NAME)}",
    )
    metrics = parser.add_mutually_exclusive_group()
    metrics.add_argument("--no-metrics", action="store_true", help="disable /metrics")
    metrics.add_argument(
        "--metrics-open",
        action="store_true",
        help="serve /metrics without the API key; it contains the model's name, load and latencies, but no prompts",
    )


def origins(text: str) -> str:
    """Return a comma-separated list of origins without spaces and trailing slashes. Raises ArgumentTypeError for text
    that is not an origin.
    """
    found = [part.strip().rstrip("/") for part in text.split(",")]
    for origin in found:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise argparse.ArgumentTypeError(
                f"{origin!r:.80} is not accepted: must be * or an origin such as https://chat.example"
                " or http://localhost:3000"
            )
    return ",".join(found)


def api_key(args: argparse.Namespace) -> str:
    """Return the API keys for clients, separated by commas, or "" if there are none. Raises BadInput for text that
    cannot be sent in a header.
    """
    key: str = os.environ.get(API_KEY_VARIABLE, "") if args.api_key is None else args.api_key
    if args.api_key == "" or len(key) > MAX_API_KEY or not (key.isascii() and key.isprintable()) or key != key.strip():
        raise BadInput(f"the API key is not accepted: must be 1 to {MAX_API_KEY} printable ASCII characters")
    return key


def run(args: argparse.Namespace) -> int:
    if args.max_requests < 1 or args.max_connections < 1 or args.drain_seconds < 0:
        names = "--max-requests, --max-connections and --drain-seconds"
        raise BadInput(f"{names} must be whole numbers above 0 (the last: 0 or more)")
    from kvscope_engine.http.api_state import HttpLimits, HttpSettings
    from kvscope_engine.http.http_server import HttpServer
    from kvscope_engine.server.parent_watch import watch_parent
    from kvscope_telemetry.metrics.metrics_page import PATH

    if args.exit_with_parent is not None:
        watch_parent(args.exit_with_parent)
    settings = HttpSettings(
        endpoint=args.endpoint,
        key=args.key,
        api_key=api_key(args),
        served_name=args.served_model_name or "",
        tokenizer=args.tokenizer,
        tool_call_parser=args.tool_call_parser or "",
        trust_forwarded=args.trust_forwarded,
        limits=HttpLimits(
            max_connections=args.max_connections,
            max_requests=args.max_requests,
            max_body_bytes=args.max_body,
            drain_s=float(args.drain_seconds),
        ),
        open_paths=frozenset((PATH,) if args.metrics_open else ()),
        allowed_origins=tuple(args.allowed_origins.split(",")) if args.allowed_origins else (),
    )
    is_child = args.listen_fd is not None
    with (
        socket.socket(fileno=args.listen_fd) if is_child else listen(args.listen) as listener,
        _pages(args, settings) as pages,
    ):
        if not is_child:
            print(f"listening on {listener_url(listener)}", flush=True)
        HttpServer(settings, listener, pages).run()
    return 0


@contextmanager
def _pages(args: argparse.Namespace, settings: HttpSettings) -> Iterator[list[BaseRoute]]:
    if args.no_metrics:
        yield []
        return
    from kvscope_engine.http.http_server import metrics_route
    from kvscope_telemetry.metrics.metrics_page import MetricsPage

    page = MetricsPage(settings.endpoint, key=settings.key, served_name=settings.served_name)
    try:
        yield [metrics_route(page)]
    finally:
        page.close()
