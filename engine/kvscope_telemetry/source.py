"""Source of frames: the common interface of live engines, other engines and recordings.

A source reads and decodes in its own thread, and coalesces received messages into at most one `Update`. The desktop
polls it once per display frame and applies it to its `Mirror`. Draws nothing, and never blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

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
    """A user, named in the reason, paused the engine."""
    REFUSED = "refused"
    """The engine refuses the connection, for the reason given."""
    STUCK = "stuck"
    """Heartbeats arrive and there are unfinished requests, but the step number does not change."""
    STALE = "stale"
    """No heartbeat for 1.5 s."""
    ENDED = "ended"
    """The engine said goodbye, or its process has ended, for the reason given."""
    PLAYBACK = "playback"
    """A recording is played. If playback does not advance, the reason is given."""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """State of a source, and counters of received messages."""

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
    """Number of states, tiers and words from a later version, which are shown as unknown."""
    latency_ns: int = -1
    """Time from the newest frame's `time_ns` to its receipt; -1 if the engine is on another machine."""
    last_message_ns: int = 0
    role: str = ""
    """Role of this client at the engine: "viewer" or "operator"; empty before the engine has reported it."""
    intervenes: bool = False
    """Whether the engine supports the commands step, preempt, pin and evict, and changing its limits."""
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
"""Columns of `Update.series`, int64, with one entry per frame. The last four are totals of the epoch."""


@dataclass(frozen=True, slots=True)
class Update:
    """All messages received since the last `poll_update()`, coalesced.

    `snapshot` must be applied first (if not None, it replaces all state: a new epoch or a resync), then the other
    fields.
    """

    snapshot: Snapshot | None = None
    blocks: WholeBlocks | None = None
    """Blocks of the snapshot, if the reading thread has already unpacked them."""
    block_ids: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Ids of changed blocks, shape (n,). If an id occurs twice, its later row is used."""
    block_columns: Mapping[str, Column] = field(default_factory=dict)
    """Each ledger column of the changed rows, shape (n,)."""
    new_requests: tuple[RequestInfo, ...] = ()
    requests: tuple[RequestRows, ...] = ()
    """Changes of requests, oldest first."""
    request_time_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Engine time of each row in `requests`, concatenated; empty if not recorded."""
    series: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """`SERIES_FIELDS` of the frames, shape (num_frames,) each."""
    first_token_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    inter_token_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    evicted: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Block ids as in `messages.telemetry.Moves`, over all frames. Like in the next three fields, an id may occur
    several times.
    """
    copied: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    saved: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    loaded: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    events: tuple[Event, ...] = ()
    counters: Counters | None = None
    """Totals as of the newest frame; None if no frame was received."""
    samples: tuple[DeviceSample, ...] = ()
    memory: MemoryBreakdown | None = None
    progress: Progress | None = None
    heartbeat: Heartbeat | None = None
    readings: tuple[Reading, ...] = ()
    devices: tuple[Devices, ...] = ()
    """Samples of all GPUs and the host, in order."""

    @property
    def is_sign_of_life(self) -> bool:
        """Whether the update only shows that the engine is alive.

        Such updates have heartbeats, samples of device and memory, and the progress "ready" that an engine repeats
        every few seconds.
        """
        is_loading = self.progress is not None and self.progress.stage != "ready"
        changes = (self.snapshot, self.series, self.new_requests, self.requests, self.events, is_loading)
        return not any(changes) and not self.block_ids.size


class Source(Protocol):
    """A source of updates. `poll_update` and `status` never block; `close` is idempotent.

    The hello in its snapshots lists the data and commands that it supports (`Capabilities`).
    """

    @property
    def name(self) -> str:
        """Name to display: an endpoint or a file."""

    @property
    def status(self) -> SourceStatus: ...

    def poll_update(self) -> Update | None:
        """Return an update with all messages since the last call; None without messages."""

    def close(self) -> None:
        """Stop the thread and close the sockets within a second."""
