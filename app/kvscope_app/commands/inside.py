"""`kvscope inside`: runs a server of vLLM or SGLang with kvscope's plugin.

Everything is checked before the server starts. Then the server replaces this process, so that its exit code, signals
and output are its own. Needs no Qt: it runs in the server's environment.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from kvscope_app.commands.host_command import HostCommand, find_command
from kvscope_inside.endpoints import ENDPOINT, endpoint_of_rank
from kvscope_telemetry.errors import BadInput, EndpointInUse, KvscopeError
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.transport.bind_address import (
    DEFAULT_PORT,
    IpcAddress,
    TcpAddress,
    default_endpoint,
    parse_bind_address,
)
from kvscope_telemetry.transport.endpoint_lock import EndpointLock

_PROGRAM: Final = "kvscope"
_EXAMPLE: Final = f"{_PROGRAM} inside vllm serve MODEL"
_PLUGIN: Final = "kvscope"
_MAX_PRINTED_RANKS: Final = 8
_IGNORED_BY_PYTHON: Final = ("SIGPIPE", "SIGXFSZ")


def add_inside_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "inside",
        help="run vLLM or SGLang with kvscope's plugin",
        usage=f"{_PROGRAM} inside [--endpoint ENDPOINT] COMMAND ...",
        description="Run a command that starts vLLM or SGLang, with kvscope's plugin switched on, and print the"
        f" command that attaches to it, such as `{_EXAMPLE}` or `{_PROGRAM} inside python -m sglang.launch_server"
        " --model-path MODEL`. Signals and the exit code are those of the command. kvscope must be installed in"
        " the environment of the engine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--endpoint",
        metavar="ENDPOINT",
        help="where the plugin publishes: ipc:///DIR, or tcp://HOST:PORT; further data-parallel ranks use DIR-1, or"
        f" PORT + 2, and so on (default: the variable {ENDPOINT}, or {default_inside_endpoint()})",
    )
    parser.add_argument(
        "command", metavar="COMMAND", nargs=argparse.REMAINDER, help="the command and its options, as without kvscope"
    )
    parser.set_defaults(run=run_inside)
    return parser


def default_inside_endpoint() -> str:
    """Return the endpoint beside that of kvscope's own engine."""
    own = default_endpoint()
    return f"{own}/inside" if own.startswith("ipc:") else f"tcp://127.0.0.1:{DEFAULT_PORT + 10}"


def run_inside(args: argparse.Namespace) -> int:
    """Replace this process by the command. Returns only if the command could not be run.

    Raises BadInput for a command or endpoint that is not accepted, EndpointInUse for one that is in use.
    """
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise BadInput(f"COMMAND is missing: such as `{_EXAMPLE}`")
    endpoint = args.endpoint or os.environ.get(ENDPOINT) or default_inside_endpoint()
    _check_endpoint(endpoint)
    command = find_command(words, os.environ)
    endpoints = [endpoint_of_rank(endpoint, rank) for rank in command.ranks]
    for each in endpoints:
        _require_free(each)
    command.require_plugin(os.environ)
    print_line(f"{_PROGRAM}: watch {_name(command)} with: {_attach_command(endpoints)}", file=sys.stderr)
    for name in _IGNORED_BY_PYTHON:  # a program inherits which signals are ignored
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        os.execve(command.program, list(command.arguments), _environment(command, endpoint, os.environ))
    except OSError as error:
        raise KvscopeError(f"cannot run {command.program}: {error.strerror}") from None


def _check_endpoint(endpoint: str) -> None:
    address = parse_bind_address(endpoint)
    if isinstance(address, TcpAddress) and not address.port:
        raise BadInput(f"endpoint {endpoint!r} is not accepted: name the port, because clients must know it")


def _require_free(endpoint: str) -> None:
    """Raise EndpointInUse if another process serves `endpoint`, BadInput if none could."""
    address = parse_bind_address(endpoint)
    if isinstance(address, IpcAddress):
        EndpointLock(address.folder, endpoint).release()
        return
    family = socket.AF_INET6 if address.host.startswith("[") else socket.AF_INET
    host = "" if address.host == "*" else address.host.strip("[]")
    for port in (address.port, address.port + 1):
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, port))
            except OSError as error:
                raise EndpointInUse(
                    f"endpoint {endpoint} cannot be used: port {port}: {error.strerror}; choose another with --endpoint"
                ) from None


def _environment(command: HostCommand, endpoint: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the engine. Its own list of plugins is extended, if there is one."""
    changed = dict(environment) | {ENDPOINT: endpoint}
    variable = "" if command.engine is None or command.engine.plugin is None else command.engine.plugin.plugins_variable
    if variable in changed:
        names = [name for name in changed[variable].split(",") if name.strip()]
        changed[variable] = ",".join(dict.fromkeys([*names, _PLUGIN]))
    return changed


def _name(command: HostCommand) -> str:
    return "it" if command.engine is None else command.engine.name


def _attach_command(endpoints: list[str]) -> str:
    shown = [f"--attach {shlex.quote(_address_for_clients(endpoint))}" for endpoint in endpoints[:_MAX_PRINTED_RANKS]]
    more = len(endpoints) - len(shown)
    return " ".join([_PROGRAM, *shown]) + (f" (and {more} more ranks)" if more else "")


def _address_for_clients(endpoint: str) -> str:
    """Return the address to attach to. An endpoint on all interfaces is shown with this machine's name."""
    address = parse_bind_address(endpoint)
    if isinstance(address, TcpAddress) and address.host in ("*", "0.0.0.0", "[::]"):
        with suppress(OSError):
            return f"tcp://{socket.gethostname()}:{address.port}"
    return endpoint
