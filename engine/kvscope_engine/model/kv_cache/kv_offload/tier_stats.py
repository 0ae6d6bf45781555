"""Statistics of the lower tiers: what they moved and how much memory they take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Bytes and seconds since the start, per direction. On a GPU, seconds of saves and loads are those of the copy
    stream."""

    saved_bytes: int
    saved_seconds: float
    loaded_bytes: int
    loaded_seconds: float
    offloaded_bytes: int = 0
    """Bytes written to the file. `offload_seconds` is the time of the writer thread."""
    offload_seconds: float = 0.0
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0
    num_lost: int = 0
    """Number of blocks that were requested from disk and were not intact."""
    host_requested_bytes: int
    host_real_bytes: int
    host_is_pinned: bool
    torch_pinned_bytes: int
    """Bytes that torch's pinned allocator would have taken for the same host memory."""
    disk_is_direct: bool = False
    """Whether the file is accessed with direct I/O, bypassing the page cache."""
