"""Validates endpoints of KV events, and decides which side binds them and the port of each data-parallel rank.

Opens no sockets.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.transport.bind_address import MAX_IPC_PATH_BYTES

_WILDCARD_HOSTS: Final = ("*", "0.0.0.0", "[::]", "::")
_MAX_PORT: Final = 65535


def check_endpoint(name: str, endpoint: str, *, is_client: bool = False) -> None:
    """Raise BadInput, naming the option `name`, unless `endpoint` is tcp://HOST:PORT or ipc://PATH.

    An endpoint to connect to (`is_client`) needs a host and a port; one to bind may have the host `*` and port 0.
    """
    scheme, _, location = endpoint.partition("://")
    if (
        scheme == "ipc"
        and 0 < len(location.encode(errors="surrogateescape")) <= MAX_IPC_PATH_BYTES
        and "\0" not in location
    ):
        return
    host, _, port = location.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= _MAX_PORT
    if scheme != "tcp" or not host or not is_number or any(letter.isspace() for letter in host):
        raise BadInput(f"{name}={endpoint!r} is not accepted: tcp://HOST:PORT or ipc://PATH")
    if is_client and (host in _WILDCARD_HOSTS or port.strip("0") == ""):
        raise BadInput(
            f"{name}={endpoint!r} is not accepted: the host and port to connect to, such as tcp://127.0.0.1:5557"
        )


def binds(endpoint: str) -> bool:
    """Whether a publisher binds `endpoint`. By the rule of vLLM and SGLang, it binds ipc:// and wildcard hosts, and
    connects to a named host.
    """
    if endpoint.startswith("ipc://"):
        return True
    return endpoint.partition("://")[2].rpartition(":")[0] in _WILDCARD_HOSTS


def of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of data-parallel rank `rank`: rank 0's `endpoint`, with `rank` added to its port.

    Raises BadInput if there is no such port.
    """
    if rank == 0:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit() or int(port) + rank > _MAX_PORT:
        raise BadInput(f"endpoint {endpoint!r} is not accepted for data-parallel rank {rank}: tcp, and a port above it")
    return endpoint if int(port) == 0 else f"{base}:{int(port) + rank}"


def is_ipv6(endpoint: str) -> bool:
    """Whether a socket for `endpoint` needs ZeroMQ's IPv6 option."""
    return "[" in endpoint or "::" in endpoint.partition("://")[2]
