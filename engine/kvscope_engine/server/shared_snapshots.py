"""Packs snapshots for all clients: one packed snapshot is sent to all clients that wait, and packing takes a bounded
share of the engine's time.

A snapshot stays valid until the next frame, which contains all later changes. Packing a million block rows takes tens
of milliseconds. While requests run, clients that ask soon after a packing therefore wait for the next one and share it.
Independent of sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvscope_engine.server.served_engine import ServedEngine
from kvscope_telemetry.messages.commands import Failed, Reply
from kvscope_telemetry.messages.telemetry import Snapshot

MIN_INTERVAL_FACTOR: Final = 4
"""Minimum time between two packings while steps run, as a multiple of the duration of the last packing."""


class SharedSnapshots:
    def __init__(
        self,
        engine: ServedEngine,
        reply: Callable[[bytes, Reply], None],
        max_waiting: int,
        is_stepping: Callable[[], bool],
    ) -> None:
        self.is_stale = False
        """Whether the state has changed since the last packing in a way that no frame reports, because no step
        runs. Set by callers.
        """
        self._engine = engine
        self._reply = reply
        self._max_waiting = max_waiting
        self._is_stepping = is_stepping
        self._latest: Snapshot | None = None
        self._waiting: dict[bytes, list[int]] = {}
        self._next_packing_s = 0.0

    def request(self, client: bytes, tag: int) -> None:
        if self._is_fresh or self._may_pack:
            self._send(client, self._current_snapshot(), tag)
            return
        tags = self._waiting.setdefault(client, [])
        if len(tags) < self._max_waiting:
            tags.append(tag)
            return
        reason = f"{len(tags)} snapshots requested already: at most {self._max_waiting} per client at a time"
        self._reply(client, Failed(reason=reason, tag=tag))

    def tick(self) -> None:
        """Send a snapshot to the waiting clients if packing is due. Call it after each step, and when no
        further step will run.
        """
        if self._waiting and (self._is_fresh or self._may_pack):
            snapshot, waiting, self._waiting = self._current_snapshot(), self._waiting, {}
            for client, tags in waiting.items():
                for tag in tags:
                    self._send(client, snapshot, tag)

    def remove_client(self, client: bytes) -> None:
        self._waiting.pop(client, None)

    def refuse_all(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for client, tags in waiting.items():
            for tag in tags:
                self._reply(client, Failed(reason=reason, tag=tag))

    def _send(self, client: bytes, snapshot: Snapshot, tag: int) -> None:
        """Send `snapshot` with the current time instead of the time of packing, because the state in a snapshot is
        valid until the next frame.

        An idle engine may have packed the snapshot minutes ago, and a recording begins at the time of its first
        snapshot.
        """
        self._reply(client, msgspec.structs.replace(snapshot, tag=tag, time_ns=time.monotonic_ns()))

    @property
    def _is_fresh(self) -> bool:
        return self._latest is not None and self._latest.seq == self._engine.last_seq and not self.is_stale

    @property
    def _may_pack(self) -> bool:
        return time.monotonic() >= self._next_packing_s or not self._is_stepping()

    def _current_snapshot(self) -> Snapshot:
        if self._latest is None or not self._is_fresh:
            started_s = time.monotonic()
            self._latest = self._engine.snapshot(0)
            self.is_stale = False
            ended_s = time.monotonic()
            self._next_packing_s = ended_s + MIN_INTERVAL_FACTOR * (ended_s - started_s)
        return self._latest
