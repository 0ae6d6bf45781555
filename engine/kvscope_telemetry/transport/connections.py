"""Engines that the user connects to, and the key for each: `~/.config/kvscope/connections.toml`.

    [[connection]]
    endpoint = "tcp://127.0.0.1:7710"
    key = "laptop.key"          # a path, relative to the directory of this file
    label = "GPU box"

    [[connection]]
    endpoint = "vllm://gpu-box:8000"
    kv_events = "tcp://gpu-box:5557"
    tls = true

Owns that file's format and the choice of a key for an endpoint. The file contains no secrets. Must not depend on
sockets.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from kvscope_telemetry.credentials.key_files import ClientKey, read_client_key
from kvscope_telemetry.credentials.key_ring import config_folder, local_key
from kvscope_telemetry.credentials.private_files import MAX_BYTES, toml_text, write_config
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.transport.endpoints import endpoints, is_loopback
from kvscope_telemetry.transport.ssh_tunnel import SCHEME, SshAddress

NO_KEY: Final = Path("none")
"""Path to pass as a key file in order to use no key, even if one is remembered for the endpoint."""
MAX_REMEMBERED: Final = 100
_WHAT: Final = "connections file"


@dataclass(frozen=True, slots=True)
class Connection:
    """An engine, and the credentials to access it."""

    endpoint: str
    key: str = ""
    """Path of the key file; empty if there is none."""
    label: str = ""
    kv_events: str = ""
    """Address at which an engine other than kvscope's own publishes KV events; empty if the engine reports this
    address itself.
    """
    tls: bool = False
    ca: str = ""
    """Path of a PEM file with CA certificates for TLS; empty to use the system's certificates."""


def connections_path() -> Path:
    return config_folder() / "connections.toml"


def read_connections() -> list[Connection]:
    """Return the connections in the order of the file; empty if there is no file. Raises BadInput for an invalid
    file.
    """
    path = connections_path()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
        tables = tomllib.loads(data.decode()).get("connection", [])
        return msgspec.convert(tables, list[Connection])
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{_WHAT} {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"{_WHAT} {path} is not accepted: {' '.join(str(error).split())}") from None


def remember(connection: Connection) -> None:
    """Insert a connection at the beginning, replacing one with the same endpoint. Raises BadInput if the file cannot be
    written.
    """
    others = [other for other in read_connections() if other.endpoint != connection.endpoint]
    _write([connection, *others][:MAX_REMEMBERED])


def rename(endpoint: str, label: str) -> None:
    """Change the label of a remembered connection, if there is one for `endpoint`. Raises BadInput if the file
    is invalid or cannot be written.
    """
    before = read_connections()
    after = [replace(known, label=label) if known.endpoint == endpoint else known for known in before]
    if after != before:
        _write(after)


def remove(endpoint: str) -> None:
    """Remove a connection from the file; its key file is not deleted. Raises BadInput if the file is invalid or
    cannot be written.
    """
    _write([known for known in read_connections() if known.endpoint != endpoint])


def key_for(endpoint: str, given: Path | None = None) -> ClientKey | None:
    """Return the CURVE key of the client with which to connect to `endpoint`; None to connect without a key.

    It is the key in the file `given` (`NO_KEY`: none), or the one remembered for the endpoint, or this user's local
    key, whichever comes first. The local key was created by an engine of the same user on this machine, and is used for
    tcp on loopback only. Raises BadInput for an invalid key file.
    """
    is_tunnel = endpoint.startswith(f"{SCHEME}://")
    if is_tunnel:
        SshAddress.parse(endpoint)
    else:
        endpoints(endpoint)
    if given is not None:
        return None if given == NO_KEY else read_client_key(given.expanduser())
    if endpoint.startswith("ipc"):
        return None
    for connection in read_connections():
        if connection.endpoint == endpoint and connection.key:
            return read_client_key(connections_path().parent / Path(connection.key).expanduser())
    own = local_key() if not is_tunnel and is_loopback(endpoint) else None
    return None if own is None else read_client_key(own)


def _write(connections: list[Connection]) -> None:
    path = connections_path()
    write_config(path, "".join(map(_table, connections)), _WHAT)


def _table(connection: Connection) -> str:
    names = ("endpoint", "key", "label", "kv_events", "ca")
    lines = [f"{name} = {toml_text(value)}\n" for name in names if (value := getattr(connection, name))]
    lines += ["tls = true\n"] if connection.tls else []
    return "[[connection]]\n" + "".join(lines) + "\n"
