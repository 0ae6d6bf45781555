"""Interface for copying blocks between tiers, used by `LowerTiers`, which decides what is copied. Imports no torch.

The engine's implementation copies bytes, the simulator's only counts blocks, and that of the tests checks the calls.
Calls take effect as if each were complete when it returns. An implementation may defer copies as long as this cannot be
observed, and must have made them when `flush` returns. Blocks are numbered as in the pool, slots from 0 in each tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvscope_engine.policy.prefixes.prefix_index import Prefix


class TierMover(Protocol):
    """Copies whole blocks in batches: `sources[i]` to `targets[i]`, with distinct targets.

    A failing tier raises no error: the return values report the failed copies, and `has_disk` is False from then on.
    Only errors after which the engine cannot continue are raised.
    """

    @property
    def failure(self) -> str:
        """Reason why the disk tier is no longer used, one line; empty if there was no failure."""

    @property
    def has_disk(self) -> bool:
        """Whether the disk tier can be written. After a failure (disk full or removed) this is False for good."""

    @property
    def num_offloadable(self) -> int:
        """Number of slots that `offload` can write now without waiting for the drive."""

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks of the pool to slots in host memory: `blocks[i]` to `slots[i]`."""

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots in host memory to blocks of the pool: `slots[i]` to `blocks[i]`."""

    def offload(self, slots: Sequence[int], disk_slots: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[bool]:
        """Copy slots in host memory to slots on disk. Returns, for each slot, whether it was written.

        `prefixes` identify the content at the next start if the disk file is retained; None for blocks that only a
        swapped-out request needs.
        """

    def load_from_disk(self, disk_slots: Sequence[int], slots: Sequence[int]) -> list[bool]:
        """Copy slots on disk to slots in host memory. Returns, for each slot, whether its content was read intact.

        The content of a slot that was not read intact is lost.
        """

    def flush(self) -> None:
        """Complete all copies, in stream order: work launched on the device after this may write to the blocks."""

    def swap_seconds(self, num_blocks: int) -> float:
        """Return the measured time to copy `num_blocks` blocks to host memory and back, in seconds."""

    def load_seconds(self, num_blocks: int, num_from_disk: int) -> float:
        """Return the measured time to load `num_blocks` blocks into the pool, `num_from_disk` of them from disk, in
        seconds.
        """

    def forget_prefixes(self) -> None:
        """Ensure that the current content of the disk is not found at the next start."""

    def recovered(self) -> Sequence[tuple[int, Prefix]]:
        """Return the disk slots that a previous run of the engine filled, each with the prefix of its content."""
