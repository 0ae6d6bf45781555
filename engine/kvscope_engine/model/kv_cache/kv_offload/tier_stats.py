"""Counts what the lower tiers did and what they take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Bytes and seconds since the start, each way. On a GPU seconds are the copy stream's."""

    saved_bytes: int
    saved_seconds: float
    loaded_bytes: int
    loaded_seconds: float
    offloaded_bytes: int = 0
    """That reached the file; seconds of the thread that writes."""
    offload_seconds: float = 0.0
    risen_bytes: int = 0
    risen_seconds: float = 0.0
    num_lost: int = 0
    """Blocks that were asked back from disk and did not come whole."""
    host_asked_bytes: int
    host_real_bytes: int
    host_is_pinned: bool
    torch_pinned_bytes: int
    """What torch's pinned allocator would have taken for the same."""
    disk_is_direct: bool = False
    """Whether the file is read and written past the page cache."""
