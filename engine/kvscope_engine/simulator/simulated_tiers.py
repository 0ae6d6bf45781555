"""Lower tiers of a simulated engine: their sizes, and how requests are preempted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_telemetry.engine_config import PREEMPTIONS
from kvscope_telemetry.errors import BadInput

MAX_BYTES: Final = 1 << 50
MAX_TIER_BLOCKS: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTiers:
    """Sizes of the tiers below the KV pool (host memory, disk), and the preemption mode.

    Raises BadInput for a value out of range, and for a disk or swapping without host memory.
    """

    kv_host_memory: int = 0
    """Bytes of host memory below the pool; 0 if there is no lower tier."""
    kv_disk: int = 0
    """Bytes of disk below host memory; 0 if there is no disk tier."""
    preemption: str = "auto"

    def __post_init__(self) -> None:
        for name in ("kv_host_memory", "kv_disk"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_BYTES:
                raise BadInput(f"{name}={value} is not accepted: must be from 0 to {MAX_BYTES} bytes")
        if self.preemption not in PREEMPTIONS:
            raise BadInput(f"preemption={self.preemption!r} is not accepted: must be one of {', '.join(PREEMPTIONS)}")
        if self.preemption == "swap" and not self.kv_host_memory:
            raise BadInput("preemption='swap' is not accepted without host memory to swap to (--kv-host-memory)")
        if self.kv_disk and not self.kv_host_memory:
            raise BadInput(f"kv_disk={self.kv_disk} is not accepted without host memory above it (--kv-host-memory)")

    def __bool__(self) -> bool:
        return self.kv_host_memory > 0

    def num_tier_blocks(self, block_bytes: int) -> tuple[int, int]:
        """Return the number of blocks that fit in host memory and on disk.

        Raises BadInput if a tier is smaller than one block or has more than `MAX_TIER_BLOCKS` blocks.
        """
        return (
            _num_blocks("kv_host_memory", self.kv_host_memory, block_bytes),
            _num_blocks("kv_disk", self.kv_disk, block_bytes),
        )


def _num_blocks(name: str, num_bytes: int, block_bytes: int) -> int:
    if not num_bytes:
        return 0
    if not block_bytes:
        raise BadInput(f"{name}={num_bytes} is not accepted with kv_bytes_per_token=0: how many blocks is that?")
    if not block_bytes <= num_bytes <= block_bytes * MAX_TIER_BLOCKS:
        raise BadInput(
            f"{name}={num_bytes} is not accepted: one block takes {block_bytes} bytes, and at most {MAX_TIER_BLOCKS}"
            " blocks are accepted"
        )
    return num_bytes // block_bytes
