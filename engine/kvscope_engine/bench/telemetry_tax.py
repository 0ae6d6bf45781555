"""Measures the cost of telemetry: the same work with telemetry published to an attached subscriber, and without."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvscope_engine.bench.measure import Contender, rates
from kvscope_engine.bench.workloads import BenchWorkload
from kvscope_telemetry.messages.telemetry import Heartbeat, TelemetryMessage
from kvscope_telemetry.transport.server_sockets import ServerSockets

WATCHER = """
import sys, time
from kvscope_telemetry.sources.live_source import LiveSource
source = LiveSource(sys.argv[1])
print("watching", flush=True)
while True:
    source.poll_update()
    time.sleep(0.016)
"""


@contextmanager
def attached_subscriber() -> Iterator[Callable[[TelemetryMessage], None]]:
    """Yield the publish function of a private endpoint, to which a subscriber in another process is attached."""
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        endpoint = f"ipc://{folder}/engine/telemetry"
        sockets = ServerSockets(endpoint, on_command=_ignore, heartbeat=_no_heartbeat)
        with subprocess.Popen([sys.executable, "-c", WATCHER, endpoint], stdout=subprocess.PIPE) as watcher:
            try:
                assert watcher.stdout is not None, "the watcher's output is a pipe"
                watcher.stdout.readline()
                yield sockets.publish
            finally:
                watcher.kill()
                sockets.close()


class _PublishingContender:
    """Contender that runs the engine with telemetry either published or discarded."""

    def __init__(self, name: str, ours: Any, publish: Callable[[TelemetryMessage], None] | None) -> None:
        self.name = name
        self._ours = ours
        self._publish = publish

    def run(self, workload: BenchWorkload) -> None:
        self._ours.publish_to(self._publish)
        self._ours.run(workload)
        self._ours.publish_to(None)


def telemetry_ratio(
    ours: Any, workload: BenchWorkload, repeats: int, show_progress: Callable[[str], None]
) -> dict[str, float]:
    """Return the ratio of tokens per CPU-second with telemetry to tokens per CPU-second without it: median, lowest and
    highest.

    CPU time includes that of the publisher's thread.
    """
    ratios: list[float] = []
    with attached_subscriber() as publish:
        contenders: list[Contender] = [
            _PublishingContender("on", ours, publish),
            _PublishingContender("off", ours, None),
        ]
        for _ in range(repeats):
            rates_of_contender = rates(contenders, workload, 1, show_progress)
            ratios.append(rates_of_contender["on"][0].per_cpu_second / rates_of_contender["off"][0].per_cpu_second)
            contenders.reverse()  # the first to run may have colder caches or a higher clock
    return {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def _ignore(client: bytes, command: object) -> None:
    """Ignore commands: the subscriber asks for a snapshot, and this benchmark has none."""


def _no_heartbeat() -> Heartbeat | None:
    return None
