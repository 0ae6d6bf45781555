"""A scripted engine on real sockets that publishes exactly what a test says, and its metrics page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvscope_telemetry.ledger import Ledger
from kvscope_telemetry.messages.commands import Command, GetSnapshot, GetStatus, Status
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    Counters,
    DeviceInfo,
    Frame,
    Heartbeat,
    Hello,
    MemoryBreakdown,
    ModelInfo,
    RequestRows,
    Snapshot,
)
from kvscope_telemetry.metrics.metrics_page import MetricsPage
from kvscope_telemetry.transport.server_sockets import ServerSockets

WAIT_S = 60.0
SECOND = 1_000_000_000
STARTED_S = 1_700_000_000
"""Start of epoch 1 in Unix time. Each later epoch starts 1,000 s after the previous one."""
LABELS = {"model_name": "scripted", "engine": "0"}
NUM_BLOCKS, NUM_HOST = 8, 2


def wait_for(holds: Callable[[], Any], what: str) -> None:
    """Wait until `holds()` is true; fail with `what` after the timeout."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"it never came to be: {what}"
        time.sleep(0.01)


def rows(**columns: Iterable[int]) -> RequestRows:
    """Return packed request rows. Columns that are not given are 0."""
    dtypes = {"number": "<u4", "state": "u1", "num_preemptions": "<u2"}
    count = len(list(columns["number"]))
    names = [name for name in RequestRows.__struct_fields__ if name != "table_blocks"]
    return RequestRows(
        **{name: np.array(columns.get(name, [0] * count), dtypes.get(name, "<u4")).tobytes() for name in names}
    )


class ScriptedEngine:
    """An engine that is up until `close`. Its blocks are in `ledger` and published by `publish_step`."""

    def __init__(self, endpoint: str, epoch: int = 1) -> None:
        self.ledger = Ledger(NUM_BLOCKS + NUM_HOST)
        self.ledger.tier[NUM_BLOCKS:] = 1
        hello = Hello(
            epoch=epoch,
            time_ns=0,
            wall_time_ns=(STARTED_S + 1000 * (epoch - 1)) * SECOND,
            model=ModelInfo(name="scripted", max_model_len=1000),
            cache=CacheInfo(
                num_blocks=NUM_BLOCKS,
                num_host_blocks=NUM_HOST,
                block_size=16,
                block_bytes=100,
                dtype="bfloat16",
                prefix_caching=True,
            ),
            device=DeviceInfo(kind="cpu"),
        )
        self._state = Snapshot(hello=hello, seq=0, step=0, time_ns=0, blocks=self.ledger.pack_all())
        self._lock = threading.Lock()
        self.sockets = ServerSockets(
            endpoint, on_command=self._answer, heartbeat=self._heartbeat, keyless=Role.OPERATOR
        )

    def publish(self, message: Any) -> None:
        """Publish a message other than a frame."""
        self.sockets.publish(message)

    @property
    def epoch(self) -> int:
        return self._state.hello.epoch

    def publish_step(
        self, seconds: float, *, blocks: Iterable[int] = (), counters: dict[str, int] | None = None, **fields: Any
    ) -> None:
        """Publish a step that ended at `seconds`. Counters are added to the previous ones."""
        frame = self._next(seconds, blocks, counters or {}, fields)
        self.sockets.publish(frame)

    def lose_step(self, seconds: float, *, counters: dict[str, int], **fields: Any) -> None:
        """Run a step whose frame is lost."""
        self._next(seconds, (), counters, fields)

    def close(self) -> None:
        self.sockets.close()

    def _next(self, seconds: float, blocks: Iterable[int], counters: dict[str, int], fields: dict[str, Any]) -> Frame:
        with self._lock:
            before = self._state
            totals: Counters = replace(before.counters, **counters)
            seq, time_ns = before.seq + 1, round(seconds * SECOND)
            infos = (*before.requests_info, *fields.get("new_requests", ()))
            ended = {event.number for event in fields.get("events", ()) if event.kind in ("finished", "aborted")}
            infos = tuple(info for info in infos if info.number not in ended)
            self._state = replace(
                before,
                seq=seq,
                step=seq,
                time_ns=time_ns,
                blocks=self.ledger.pack_all(),
                requests_info=infos,
                requests=rows(number=[info.number for info in infos], num_output_tokens=[1] * len(infos)),
                counters=totals,
            )
            changed = self.ledger.pack(np.array(list(blocks), np.uint32))
            epoch = before.hello.epoch
        return Frame(epoch=epoch, seq=seq, step=seq, time_ns=time_ns, blocks=changed, counters=totals, **fields)

    def _heartbeat(self) -> Heartbeat:
        state = self._state
        return Heartbeat(epoch=state.hello.epoch, time_ns=time.monotonic_ns(), seq=state.seq, step=state.step)

    def _answer(self, client: bytes, command: Command) -> None:
        with self._lock:
            state = self._state
        if isinstance(command, GetSnapshot):
            self.sockets.reply(client, replace(state, tag=command.tag))
        elif isinstance(command, GetStatus):
            where = self.sockets.telemetry_endpoint
            self.sockets.reply(
                client, Status(phase="ready", telemetry_endpoint=where, hello=state.hello, tag=command.tag)
            )


class ScrapedMetrics:
    """One scrape, parsed as Prometheus text."""

    def __init__(self, page: MetricsPage) -> None:
        self.text = page.render("text/plain")[0].decode()
        self.families: dict[str, Metric] = {each.name: each for each in text_string_to_metric_families(self.text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the only sample with this name and these labels, or None if there is none."""
        found = [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]
        assert len(found) <= 1, f"{name} {labels} is there {len(found)} times"
        return found[0] if found else None

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}


def wait_for_subscription(page: MetricsPage, engine: ScriptedEngine) -> None:
    """Wait until the page receives everything that the engine publishes."""

    def is_heard() -> bool:
        weights = 1000 + engine.epoch
        engine.publish(MemoryBreakdown(epoch=engine.epoch, time_ns=0, weights_bytes=weights, kv_bytes=800))
        return ScrapedMetrics(page).value("kvscope_memory_bytes", kind="weights") == weights

    wait_for(is_heard, "an engine that is heard")


def scrape_after(page: MetricsPage, num_steps: int) -> ScrapedMetrics:
    """Scrape once `num_steps` steps were counted. Values about blocks may be slightly older."""
    wait_for(lambda: ScrapedMetrics(page).value("kvscope_steps_total") == num_steps, f"step {num_steps}")
    return ScrapedMetrics(page)
