"""Snapshots for all who ask: one packing serves everybody who waits, and packing takes a share of the time at most.

A snapshot holds until the next frame, whatever is asked in between: it is exact after the frame it names, and
what came since is in the next one. Packing a million rows takes tens of milliseconds, so while requests run those
who ask soon after a packing wait for the next and get it together. Knows no sockets; the engine packs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvscope_engine.server.served_engine import ServedEngine
from kvscope_telemetry.messages.commands import Failed, Reply
from kvscope_telemetry.messages.telemetry import Snapshot

REST: Final = 4
"""After a packing, how many times as long as it took is left to requests."""


class SharedSnapshots:
    """One for an engine. Answers through `reply`, at once or in `tick`."""

    def __init__(
        self,
        engine: ServedEngine,
        reply: Callable[[bytes, Reply], None],
        max_waiting: int,
        is_stepping: Callable[[], bool],
    ) -> None:
        self.is_stale = False
        """Set by whoever changes what only a snapshot will tell, as while nothing steps."""
        self._engine = engine
        self._reply = reply
        self._max_waiting = max_waiting
        self._is_stepping = is_stepping
        self._latest: Snapshot | None = None
        self._waiting: dict[bytes, list[int]] = {}
        self._next_packing_s = 0.0

    def ask(self, client: bytes, tag: int) -> None:
        """Answer `client`, with `tag`, now or at a tick soon."""
        if self._is_fresh or self._may_pack:
            self._send(client, self._fresh(), tag)
            return
        tags = self._waiting.setdefault(client, [])
        if len(tags) < self._max_waiting:
            tags.append(tag)
            return
        reason = f"{len(tags)} snapshots requested already: at most {self._max_waiting} per client at a time"
        self._reply(client, Failed(reason=reason, tag=tag))

    def tick(self) -> None:
        """Answer those who wait, when it is time: after each step, and when there will be none."""
        if self._waiting and (self._is_fresh or self._may_pack):
            snapshot, waiting, self._waiting = self._fresh(), self._waiting, {}
            for client, tags in waiting.items():
                for tag in tags:
                    self._send(client, snapshot, tag)

    def forget(self, client: bytes) -> None:
        """A client that is gone waits for nothing."""
        self._waiting.pop(client, None)

    def refuse_all(self, reason: str) -> None:
        """The end comes first."""
        waiting, self._waiting = self._waiting, {}
        for client, tags in waiting.items():
            for tag in tags:
                self._reply(client, Failed(reason=reason, tag=tag))

    def _send(self, client: bytes, snapshot: Snapshot, tag: int) -> None:
        """Send `snapshot` with the current time: the state holds until the next frame.

        An idle engine may have packed it minutes ago, and a recording begins at the time of its first snapshot.
        """
        self._reply(client, msgspec.structs.replace(snapshot, tag=tag, time_ns=time.monotonic_ns()))

    @property
    def _is_fresh(self) -> bool:
        return self._latest is not None and self._latest.seq == self._engine.last_seq and not self.is_stale

    @property
    def _may_pack(self) -> bool:
        return time.monotonic() >= self._next_packing_s or not self._is_stepping()

    def _fresh(self) -> Snapshot:
        if self._latest is None or not self._is_fresh:
            started = time.monotonic()
            self._latest = self._engine.snapshot(0)
            self.is_stale = False
            ended = time.monotonic()
            self._next_packing_s = ended + REST * (ended - started)
        return self._latest
