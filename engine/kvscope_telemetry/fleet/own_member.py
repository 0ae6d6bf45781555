"""Reads one of kvscope's own engines for a fleet: only the block states and counters, no requests.

Owns these block states and counters. `LiveReader`, which the desktop's windows also use, receives the stream and
describes the connection.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import zmq

from kvscope_telemetry.fleet.fleet_list import FleetEntry
from kvscope_telemetry.fleet.fleet_row import FleetRow
from kvscope_telemetry.fleet.pool_bins import PoolBins, pool_bins
from kvscope_telemetry.fleet.rates import Rates
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.telemetry import Counters, Frame, Hello, Snapshot
from kvscope_telemetry.mirror.sync import FrameRun
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_reader import MAX_MESSAGES_A_PASS, LiveReader
from kvscope_telemetry.summaries.run_figures import USAGE
from kvscope_telemetry.transport.client_sockets import ClientSockets
from kvscope_telemetry.transport.connections import key_for

CURRENT_STATES: Final = frozenset({SourceState.LIVE, SourceState.PAUSED, SourceState.STUCK})
"""Source states in which the figures are current; in others they are outdated."""
_PASSES_AT_ONCE: Final = 8
Context = zmq.Context[zmq.Socket[bytes]]


class OwnMember:
    """Fleet member for one of kvscope's engines. Used by one thread. Raises BadInput for an invalid address or key."""

    def __init__(self, entry: FleetEntry, context: Context) -> None:
        self._entry = entry
        address = entry.address
        sockets = ClientSockets(address.text, key=key_for(address.text, address.key), context=context)
        self._reader = LiveReader(sockets, taker=self._apply_runs)
        self._hello: Hello | None = None
        self._state: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._counters: Counters | None = None
        self._rates = Rates()
        self._bins: PoolBins | None = None
        self._usage: float | None = None
        self._is_stale = False

    def poll(self) -> None:
        for _ in range(_PASSES_AT_ONCE):
            if self._reader.poll()[0] < MAX_MESSAGES_A_PASS:
                break

    def row(self) -> FleetRow:
        status, hello = self._reader.status(), self._hello
        row = FleetRow(self._entry, status.state, status.reason)
        if hello is None:
            return row
        row = replace(row, engine=hello.capabilities.engine, version=hello.engine_version, model=hello.model.name)
        if status.state not in CURRENT_STATES or self._counters is None:
            return row
        self._summarize(hello)
        return replace(
            row,
            usage=self._usage,
            num_running=self._counters.num_running,
            num_waiting=self._counters.num_waiting,
            first_token_s=self._rates.first_token_s(time.monotonic_ns()),
            hit_rate=self._rates.hit_rate(),
            preemptions_per_s=self._rates.preemptions_per_s(),
            num_blocks=hello.cache.num_blocks if hello.capabilities.blocks else None,
            bins=self._bins,
        )

    def close(self) -> None:
        self._reader.finish()

    def _apply_runs(self, runs: list[FrameRun]) -> None:
        now_ns = time.monotonic_ns()
        for run in runs:
            if run.snapshot is not None:
                self._reset(run.snapshot)
            for frame in run.frames:
                if not self._apply(frame, now_ns):
                    self._reader.resync()
                    return
        if self._counters is not None:
            self._rates.count(self._counters, now_ns)

    def _reset(self, snapshot: Snapshot) -> None:
        if self._hello is None or self._hello.epoch != snapshot.hello.epoch:
            self._rates.begin()
        self._hello, self._counters = snapshot.hello, snapshot.counters
        self._state = np.frombuffer(snapshot.blocks.state, np.uint8).copy()
        self._is_stale = True

    def _apply(self, frame: Frame, now_ns: int) -> bool:
        if frame.blocks.ids:
            ids = np.frombuffer(frame.blocks.ids, "<u4")
            if int(ids.max()) >= len(self._state):
                return False
            self._state[ids] = np.frombuffer(frame.blocks.state, np.uint8)
            self._is_stale = True
        self._counters = frame.counters
        self._rates.first_tokens(frame.first_token_ns, now_ns)
        return True

    def _summarize(self, hello: Hello) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        pool = self._state[: hello.cache.num_blocks]
        num_backed = hello.cache.num_physical_blocks or hello.cache.num_blocks
        if not hello.capabilities.blocks or not num_backed:
            self._usage, self._bins = None, None
            return
        self._usage = USAGE.of({"active": float(np.count_nonzero(pool == BlockState.ACTIVE)), "pool": num_backed})
        self._bins = pool_bins(pool)
