"""Listening address of the API: parses `HOST:PORT`, and binds it before any process or model is started.

Imports no server code.
"""

from __future__ import annotations

import ipaddress
import socket

from kvscope_telemetry.errors import BadInput, KvscopeError


def parse_listen(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`, or `:PORT` or `PORT` for loopback. Raises BadInput."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise BadInput(f"{text!r:.80} is not accepted: HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:8000")
    return host.strip("[]") or "127.0.0.1", int(port)


def listen(text: str) -> socket.socket:
    """Return a socket that listens on `HOST:PORT`. Raises BadInput for a bad address, KvscopeError if it cannot be
    bound.
    """
    host, port = parse_listen(text)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BadInput(f"{text!r:.80} is not accepted: {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise KvscopeError(f"cannot listen on http://{text}: {error.strerror or error}") from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def listener_url(listener: socket.socket) -> str:
    """Return the URL at which clients on this machine reach `listener`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
