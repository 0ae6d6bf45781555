"""Where a client connects: the two sockets behind one endpoint, and when keys are needed.

The forms are those of `bind_address`: `ipc:///DIR` (or `ipc:///DIR/telemetry`) has `command` beside it,
`tcp://HOST:PORT` has commands on PORT + 1. Knows no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.sockets.bind_address import IpcAddress, TcpAddress, parse_bind_address
from kvscope_telemetry.sockets.ssh_tunnel import SCHEME, SshAddress

_EVERYWHERE = ("*", "0.0.0.0", "[::]", "::")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What the two sockets of one engine connect to."""

    telemetry: str
    command: str


def endpoints(endpoint: str) -> Endpoints:
    """The sockets of the engine at `endpoint`. Raises BadInput naming what is accepted."""
    address = parse_bind_address(endpoint)
    if isinstance(address, IpcAddress):
        return Endpoints(address.telemetry, address.command)
    if not address.port:
        raise BadInput(f"endpoint {endpoint!r} is not accepted: a port from 1 to 65534 to connect to")
    if address.host in _EVERYWHERE:
        raise BadInput(f"endpoint {endpoint!r} is not accepted: the host to connect to, not {address.host}")
    return Endpoints(f"tcp://{address.host}:{address.port}", f"tcp://{address.host}:{address.port + 1}")


def is_loopback(endpoint: str) -> bool:
    """Whether the address is this machine's own; a tunnel may lead elsewhere. Raises BadInput for no endpoint."""
    address = parse_bind_address(endpoint)
    return isinstance(address, IpcAddress) or address.is_loopback


def is_ipv6(endpoint: str) -> bool:
    """Whether the sockets need IPv6. Raises BadInput for what is no endpoint."""
    address = parse_bind_address(endpoint)
    return isinstance(address, TcpAddress) and ":" in address.host


def require_curve(endpoint: str, has_keys: bool) -> None:
    """Raise BadInput for an endpoint outside loopback without a key."""
    if endpoint.startswith(f"{SCHEME}://"):  # to that machine ssh answers for it, from there on nobody
        endpoint = SshAddress.parse(endpoint).endpoint or "ipc:///default"
    if not (has_keys or is_loopback(endpoint)):
        raise BadInput(
            f"endpoint {endpoint!r} is not accepted without a key file: outside loopback give --key FILE"
            " (`kvscope-engine keys new NAME --out FILE` makes one on the engine's machine)"
        )
