"""Statistics of the lower tiers: bytes and seconds of copies, and memory use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Bytes and seconds of copies between tiers since the start, per direction.

    `saved`: from the pool to host memory; `loaded`: from host memory to the pool; `disk_written` and `disk_read`:
    between host memory and disk.

    On a GPU, `saved_seconds` and `loaded_seconds` are measured on the copy stream.
    """

    saved_bytes: int
    saved_seconds: float
    loaded_bytes: int
    loaded_seconds: float
    disk_written_bytes: int = 0
    disk_write_seconds: float = 0.0
    """Seconds that the writer thread spent on checksums and writing."""
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0
    num_lost: int = 0
    """Number of blocks that were corrupt or unreadable when they were loaded from disk."""
    host_requested_bytes: int
    host_real_bytes: int
    host_is_pinned: bool
    torch_pinned_bytes: int
    """Bytes that torch's pinned allocator would have taken for the same host memory."""
    disk_is_direct: bool = False
    """Whether the disk tier's file is accessed with direct I/O, bypassing the page cache."""
