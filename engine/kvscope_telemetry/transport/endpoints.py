"""The addresses that a client connects to for one endpoint, and whether keys are required.

The forms are those of `bind_address`: `ipc:///DIR` (or `ipc:///DIR/telemetry`) has the socket `command` in the same
directory, `tcp://HOST:PORT` has commands on PORT + 1. Must not depend on sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.transport.bind_address import IpcAddress, TcpAddress, parse_bind_address
from kvscope_telemetry.transport.ssh_tunnel import SCHEME, SshAddress

_EVERYWHERE = ("*", "0.0.0.0", "[::]", "::")


@dataclass(frozen=True, slots=True)
class Endpoints:
    telemetry: str
    command: str


def endpoints(endpoint: str) -> Endpoints:
    """Return the addresses of the engine at `endpoint`. Raises BadInput, which names the accepted form."""
    address = parse_bind_address(endpoint)
    if isinstance(address, IpcAddress):
        return Endpoints(address.telemetry, address.command)
    if not address.port:
        raise BadInput(f"endpoint {endpoint!r} is not accepted: must be a port from 1 to 65534 to connect to")
    if address.host in _EVERYWHERE:
        raise BadInput(f"endpoint {endpoint!r} is not accepted: the host to connect to, not {address.host}")
    return Endpoints(f"tcp://{address.host}:{address.port}", f"tcp://{address.host}:{address.port + 1}")


def is_loopback(endpoint: str) -> bool:
    """Return whether the address is a loopback address. A tunnel may still lead to another machine. Raises
    BadInput for an invalid endpoint.
    """
    address = parse_bind_address(endpoint)
    return isinstance(address, IpcAddress) or address.is_loopback


def is_ipv6(endpoint: str) -> bool:
    """Return whether the sockets need IPv6. Raises BadInput for an invalid endpoint."""
    address = parse_bind_address(endpoint)
    return isinstance(address, TcpAddress) and ":" in address.host


def require_curve(endpoint: str, has_keys: bool) -> None:
    """Raise BadInput if the endpoint is outside loopback and there is no key."""
    if endpoint.startswith(f"{SCHEME}://"):  # ssh protects the way to that machine, not beyond it
        endpoint = SshAddress.parse(endpoint).endpoint or "ipc:///default"
    if not (has_keys or is_loopback(endpoint)):
        raise BadInput(
            f"endpoint {endpoint!r} is not accepted without a key file: outside loopback give --key FILE"
            " (`kvscope-engine keys new NAME --out FILE` makes one on the engine's machine)"
        )
