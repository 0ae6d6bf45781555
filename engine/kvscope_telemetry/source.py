"""Where frames come from: the one interface that live engines, other engines and recordings share.

A source reads in its own thread, decodes, and coalesces what came into at most one `Update`; the desktop
takes it once a display frame and applies it to its `Mirror`. Nothing here draws, and nothing waits.
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
from kvscope_telemetry.state.whole_blocks import WholeBlocks


class SourceState(StrEnum):
    """What a person is told about the other end."""

    CONNECTING = "connecting"
    LOADING = "loading"
    """The engine answers, its model is not ready."""
    LIVE = "live"
    PAUSED = "paused"
    """Somebody paused the engine; the reason says who."""
    REFUSED = "refused"
    """There is an engine, and it does not let us in; the reason says why."""
    STUCK = "stuck"
    """Heartbeats come, unfinished requests exist, and the step count stands still."""
    STALE = "stale"
    """No heartbeat for 1.5 s."""
    ENDED = "ended"
    """The engine said goodbye, or its process is gone; the reason is in `SourceStatus`."""
    PLAYBACK = "playback"
    """A recording is played; there is no other end. The reason says when it stands still, and why."""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The state and the numbers of the status bar."""

    state: SourceState
    reason: str = ""
    frames_received: int = 0
    frames_dropped: int = 0
    """Frames that never came (holes in `seq`), over all epochs."""
    resyncs: int = 0
    messages_rejected: int = 0
    """Messages that could not be decoded."""
    num_skipped: int = 0
    """Messages and events of a later version, of a kind that has no name here."""
    num_unknown: int = 0
    """States, tiers and words of a later version, shown as unknown."""
    latency_ns: int = -1
    """From the frame's `time_ns` to its receipt, the latest; -1 across machines."""
    last_message_ns: int = 0
    role: str = ""
    """What we may do at the engine: "viewer" or "operator"; empty before it has said so."""
    intervenes: bool = False
    """Whether the engine knows how to step, preempt, pin, evict and change its limits."""
    adapters: tuple[LoadedAdapter, ...] | None = None
    """LoRA adapters that prompts may ask for; None: it has not been said."""
    takes_adapters: bool = False
    """Whether the engine loads and unloads them when asked."""


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
"""Columns of `Update.series`, int64, one entry a frame. The last four are totals of the epoch."""


@dataclass(frozen=True, slots=True)
class Update:
    """Everything that came since the last `take()`, coalesced, in the order it must be applied.

    First `snapshot` (when not None, it replaces all state: a new epoch or a resync), then the rest.
    """

    snapshot: Snapshot | None = None
    blocks: WholeBlocks | None = None
    """Those of the snapshot, where whoever reads has made them ready."""
    block_ids: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Changed blocks, shape (n,); an id may occur twice, the later row wins."""
    block_columns: Mapping[str, Column] = field(default_factory=dict)
    """Each ledger column of those rows, shape (n,)."""
    new_requests: tuple[RequestInfo, ...] = ()
    requests: tuple[RequestRows, ...] = ()
    """Changes of requests, oldest first."""
    request_time_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """When each of those rows was told, by the engine's clock, over all of `requests`; empty: nobody noted it."""
    series: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """`SERIES_FIELDS` of the frames, shape (num_frames,) each."""
    first_token_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    inter_token_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    evicted: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """As in `messages.Moves`, of all the frames, an id perhaps several times; the same for the next three."""
    copied: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    saved: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    loaded: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    events: tuple[Event, ...] = ()
    counters: Counters | None = None
    """Totals as of the newest frame; None when no frame came."""
    samples: tuple[DeviceSample, ...] = ()
    memory: MemoryBreakdown | None = None
    progress: Progress | None = None
    heartbeat: Heartbeat | None = None
    readings: tuple[Reading, ...] = ()
    devices: tuple[Devices, ...] = ()
    """All GPUs and the host, sample by sample."""

    @property
    def is_sign_of_life(self) -> bool:
        """Whether it tells nothing but that the engine is there: heartbeats, samples of its device and its memory, and
        that it is ready, which an engine says again every few seconds."""
        is_loading = self.progress is not None and self.progress.stage != "ready"
        news = (self.snapshot, self.series, self.new_requests, self.requests, self.events, is_loading)
        return not any(news) and not self.block_ids.size


class Source(Protocol):
    """One place frames come from. `take_update` and `status` never block; `close` is idempotent.

    What it can tell and be asked for is in the hello of its snapshots (`Capabilities`).
    """

    @property
    def name(self) -> str:
        """What a person calls it: an endpoint, or a file."""

    @property
    def status(self) -> SourceStatus:
        """How it is now."""

    def take_update(self) -> Update | None:
        """What came since the last call, None when nothing did."""

    def close(self) -> None:
        """End the thread and free the sockets within a second."""
