"""Source of frames: the common interface of live engines, other engines and recordings.

A source reads and decodes in its own thread, and coalesces what arrived into at most one `Update`. The desktop takes it
once per display frame and applies it to its `Mirror`. Nothing here draws, and nothing blocks.
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
    """A user paused the engine; the reason names the user."""
    REFUSED = "refused"
    """The engine refuses the connection; the reason says why."""
    STUCK = "stuck"
    """Heartbeats arrive and there are unfinished requests, but the step count does not change."""
    STALE = "stale"
    """No heartbeat for 1.5 s."""
    ENDED = "ended"
    """The engine said goodbye, or its process is gone; the reason is in `SourceStatus`."""
    PLAYBACK = "playback"
    """A recording is played. If playback is not advancing, the reason says why."""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """State of a source and counters of what it received."""

    state: SourceState
    reason: str = ""
    frames_received: int = 0
    frames_dropped: int = 0
    """Number of frames that were not received (gaps in `seq`), over all epochs."""
    resyncs: int = 0
    messages_rejected: int = 0
    num_skipped: int = 0
    """Number of messages and events of unknown kinds, from a later version."""
    num_unknown: int = 0
    """Number of states, tiers and words from a later version, which are shown as unknown."""
    latency_ns: int = -1
    """Time from the newest frame's `time_ns` to its receipt; -1 across machines."""
    last_message_ns: int = 0
    role: str = ""
    """Our role at the engine: "viewer" or "operator"; "" before the engine has reported it."""
    intervenes: bool = False
    """Whether the engine supports step, preempt, pin, evict and changing its limits."""
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
"""Columns of `Update.series`, int64, one entry per frame. The last four are totals of the epoch."""


@dataclass(frozen=True, slots=True)
class Update:
    """Everything received since the last `poll_update()`, coalesced.

    Apply `snapshot` first (if not None, it replaces all state: a new epoch or a resync), then the rest.
    """

    snapshot: Snapshot | None = None
    blocks: WholeBlocks | None = None
    """Blocks of the snapshot, if the reading thread has already unpacked them."""
    block_ids: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Ids of changed blocks, shape (n,). If an id occurs twice, the later row wins."""
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
    """Block ids as in `messages.telemetry.Moves`, over all frames; an id may occur several times. The next three fields
    are
    alike.
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
        """Whether the update only shows that the engine is alive: heartbeats, samples of its device and memory, and
        the "ready" progress that an engine repeats every few seconds.
        """
        is_loading = self.progress is not None and self.progress.stage != "ready"
        news = (self.snapshot, self.series, self.new_requests, self.requests, self.events, is_loading)
        return not any(news) and not self.block_ids.size


class Source(Protocol):
    """A source of updates. `poll_update` and `status` never block; `close` is idempotent.

    The hello of its snapshots lists what it reports and supports (`Capabilities`).
    """

    @property
    def name(self) -> str:
        """Name for the user: an endpoint, or a file."""

    @property
    def status(self) -> SourceStatus: ...

    def poll_update(self) -> Update | None:
        """Return what was received since the last call, or None."""

    def close(self) -> None:
        """Stop the thread and close the sockets within a second."""
