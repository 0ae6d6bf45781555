"""Searches one machine for engines, all ports and sockets at the same time. Without a host: this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvscope_telemetry.discovery.found_engine import FoundEngine
from kvscope_telemetry.discovery.own_engines import own_endpoints, probe_endpoint
from kvscope_telemetry.discovery.probed_ports import probed_ports
from kvscope_telemetry.discovery.server_probe import probe_server
from kvscope_telemetry.errors import BadInput

SEARCH_S: Final = 4.0
"""Time in seconds after which the search ends. Engines that have not answered by then are not listed."""
THIS_MACHINE: Final = "127.0.0.1"


def find_engines(
    host: str = "", ports: Sequence[int] = (), *, sockets: Callable[[], list[str]] = own_endpoints
) -> tuple[FoundEngine, ...]:
    """Return the engines on `host`, or on this machine if it is empty: engines of kvscope's own and plugins first.

    Args:
        ports: HTTP ports to ask in addition to `probed_ports()`.
        sockets: Function that returns the telemetry endpoints of this machine.

    Raises:
        BadInput: for a host that is not a name or an address.
    """
    _check_host(host)
    all_ports = tuple(dict.fromkeys([*probed_ports(), *ports]))
    probes: list[Callable[[], FoundEngine | None]] = []
    if not host:
        probes += [_bind(probe_endpoint, endpoint) for endpoint in sockets()]
    probes += [_bind(probe_server, host or THIS_MACHINE, port) for port in all_ports]
    return _run_all(probes)


def _bind(probe: Callable[..., FoundEngine | None], *arguments: str | int) -> Callable[[], FoundEngine | None]:
    return lambda: probe(*arguments)


def _run_all(probes: Sequence[Callable[[], FoundEngine | None]]) -> tuple[FoundEngine, ...]:
    """Run each probe on a thread of its own. Threads that are late end later by themselves."""
    found: dict[int, FoundEngine] = {}

    def run(index: int, probe: Callable[[], FoundEngine | None]) -> None:
        engine = probe()
        if engine is not None:
            found[index] = engine

    threads = [threading.Thread(target=run, args=item, name="kvscope-find", daemon=True) for item in enumerate(probes)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + SEARCH_S
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    return tuple(engine for _, engine in sorted(found.copy().items()))


def _check_host(host: str) -> None:
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", "?")
    if not name.isprintable() or any(letter.isspace() or letter in "/@?#[]" for letter in name):
        raise BadInput(f"host {host!r} is not accepted: a name or an address without a port, such as gpu-box or [::1]")
