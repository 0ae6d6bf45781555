"""Makes a fleet's list from the engines that a person attached to before."""

from __future__ import annotations

from pathlib import Path

from kvscope_telemetry.addresses import Address
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.entries import FleetEntry
from kvscope_telemetry.keys.api_keys import read_api_keys
from kvscope_telemetry.keys.connections import Connection, read_connections


def remembered() -> tuple[tuple[FleetEntry, ...], str]:
    """Those that can be watched, and why some cannot, in one line."""
    try:
        connections, kept = read_connections(), read_api_keys()
    except BadInput as error:
        return (), str(error)
    entries, trouble = [], ""
    for connection in connections:
        address = _address(connection, kept.get(connection.endpoint, ""))
        try:
            address.check()
        except BadInput as error:
            trouble = trouble or str(error)
            continue
        entries.append(FleetEntry(address, connection.label))
    return tuple(entries), trouble


def _address(connection: Connection, api_key: str) -> Address:
    address = Address(connection.endpoint)  # its key is found by its endpoint
    if not address.is_external:
        return address
    ca = Path(connection.ca) if connection.ca else None
    return Address(connection.endpoint, None, connection.kv_events, api_key, connection.tls, ca)
