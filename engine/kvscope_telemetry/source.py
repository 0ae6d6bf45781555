"""Source of telemetry: the common interface of a live engine (kvscope's or another one) and a recording.

A source reads and decodes in its own thread, and coalesces received messages into at most one `Update`. The desktop
polls it once per display frame and applies the update to its `Mirror`. A source draws nothing and never blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import Column
from kvscope_telemetry.messages.commands import LoadedAdapter
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import (
    Counters,
    DeviceSample,
    Event,
    Heartbeat,
    MemoryBreakdown,
    Progress,
    Reading,
    RequestInfo,
    RequestRows,
    Snapshot,
)
from kvscope_telemetry.mirror.whole_blocks import WholeBlocks


class SourceState(StrEnum):
    """State of the connection to an engine, or of the engine itself."""

    CONNECTING = "connecting"
    LOADING = "loading"
    """The engine responds, but its model is not ready."""
    LIVE = "live"
    PAUSED = "paused"
    """A user paused the engine. The reason contains the user's name."""
    REFUSED = "refused"
    """The engine refuses the connection. The reason says why."""
    STUCK = "stuck"
    """Heartbeats arrive and there are unfinished requests, but the step number does not change."""
    STALE = "stale"
    """No heartbeat arrived for 1.5 s."""
    ENDED = "ended"
    """The engine sent a goodbye, or its process has ended. The reason says why."""
    PLAYBACK = "playback"
    """A recording is played. If playback does not advance, the reason says why."""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """State of a source and counters of its connection, as `Source.status` returns them."""

    state: SourceState
    reason: str = ""
    frames_received: int = 0
    frames_dropped: int = 0
    """Number of frames that were not received (gaps in `seq`), over all epochs."""
    resyncs: int = 0
    messages_rejected: int = 0
    num_skipped: int = 0
    """Number of messages and events of unknown kinds (from a later version), which are not shown."""
    num_unknown: int = 0
    """Number of received values of enumerations, such as states and tiers, that only a later version defines.
    They are shown as unknown.
    """
    latency_ns: int = -1
    """Time from the newest frame's `time_ns` to its receipt; -1 if the engine is on another machine."""
    last_message_ns: int = 0
    role: str = ""
    """Role of this client at the engine: "viewer" or "operator"; empty before the engine has reported it."""
    intervenes: bool = False
    """Whether the engine supports the commands to step, preempt, pin and evict, and to change its limits."""
    adapters: tuple[LoadedAdapter, ...] | None = None
    """LoRA adapters that prompts may use; None before the engine has reported them."""
    takes_adapters: bool = False
    """Whether the engine loads and unloads adapters on request."""


SERIES_FIELDS = (
    "time_ns",
    "seq",
    "step",
    "prefill_tokens",
    "decode_tokens",
    "num_running",
    "num_waiting",
    "batch_size",
    "schedule_ns",
    "run_ns",
    "forward_ns",
    "commit_ns",
    "record_ns",
    "flops",
    "num_bytes",
    "preemptions",
    "generation_tokens",
    "prompt_tokens",
    "cached_tokens",
)
"""Columns of `Update.series`, int64, with one value per frame. The last four columns are totals since the
engine start.
"""


@dataclass(frozen=True, slots=True)
class Update:
    """All messages received since the last `poll_update()`, coalesced.

    If `snapshot` is not None, apply it first: it replaces all state, after an engine start or a resync. Then apply all
    remaining fields.
    """

    snapshot: Snapshot | None = None
    blocks: WholeBlocks | None = None
    """Blocks of the snapshot, if the reading thread has already unpacked them."""
    block_ids: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Ids of changed blocks, shape (n,). If an id occurs several times, the values at its last occurrence apply."""
    block_columns: Mapping[str, Column] = field(default_factory=dict)
    """New values of the changed blocks by ledger column, shape (n,) each."""
    new_requests: tuple[RequestInfo, ...] = ()
    requests: tuple[RequestRows, ...] = ()
    """Changes of requests, oldest first."""
    request_time_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Engine time of each row of `requests`, concatenated over its elements; empty if these times were not recorded."""
    series: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """Values of `SERIES_FIELDS` per frame, shape (num_frames,) each."""
    first_token_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    inter_token_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    evicted: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Ids of evicted blocks (`messages.telemetry.Moves`), over all frames. In this field and in `copied`,
    `saved` and `loaded`, an id may occur several times.
    """
    copied: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    saved: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    loaded: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    events: tuple[Event, ...] = ()
    counters: Counters | None = None
    """Counter totals as of the newest frame; None if no frame was received."""
    samples: tuple[DeviceSample, ...] = ()
    memory: MemoryBreakdown | None = None
    progress: Progress | None = None
    heartbeat: Heartbeat | None = None
    readings: tuple[Reading, ...] = ()
    devices: tuple[Devices, ...] = ()
    """Samples of all GPUs and the host, in order."""

    @property
    def is_sign_of_life(self) -> bool:
        """Whether the update shows only that the engine is alive.

        Such an update contains nothing but heartbeats, device samples, memory, and the progress message "ready", which
        an engine repeats every few seconds.
        """
        is_loading = self.progress is not None and self.progress.stage != "ready"
        changes = (self.snapshot, self.series, self.new_requests, self.requests, self.events, is_loading)
        return not any(changes) and not self.block_ids.size


class Source(Protocol):
    """A source of updates. `poll_update` and `status` never block; `close` is idempotent.

    The `Hello` in a source's snapshots lists the data and commands that the source supports (`Capabilities`).
    """

    @property
    def name(self) -> str:
        """Name to display: an endpoint or a file."""

    @property
    def status(self) -> SourceStatus: ...

    def poll_update(self) -> Update | None:
        """Return an update with all messages since the last call, or None if none arrived."""

    def close(self) -> None:
        """Stop the thread and close the sockets within a second."""


@runtime_checkable
class PastSource(Protocol):
    """A live source that first publishes what happened before it was opened."""

    past_s: int
    """Number of seconds before the source was opened that it publishes; 0 for none."""
