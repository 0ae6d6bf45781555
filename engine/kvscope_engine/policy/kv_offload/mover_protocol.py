"""Interface of the code that copies blocks between tiers, as the tier bookkeeping (`policy`) uses it. No tensors here.

The engine's implementation copies real bytes, the simulator's counts them, the tests' checks them. Calls take effect as
if each were complete when it returns; an implementation may defer copies as long as this cannot be observed, and must
have made them when `flush` returns. Blocks of the pool are ids of the pool; places are slot numbers of their tier, from
0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvscope_engine.policy.prefixes.prefix_index import Prefix


class TierMover(Protocol):
    """Copies whole blocks in batches: `sources[i]` to `targets[i]`, with distinct targets.

    A tier that fails does not raise: the return values report the failed copies, and `has_disk` is False from then on.
    Only errors after which the engine cannot continue are raised.
    """

    @property
    def failure(self) -> str:
        """Why the disk tier is no longer used, one line; empty while it is."""

    @property
    def has_disk(self) -> bool:
        """Whether the disk tier can be written; False for good once it failed (full, vanished)."""

    @property
    def num_offloadable(self) -> int:
        """Number of slots that `offload` can write now without waiting for the drive."""

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks of the pool to slots in host memory."""

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots in host memory to blocks of the pool."""

    def offload(self, slots: Sequence[int], disk_slots: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[bool]:
        """Copy slots in host memory to slots on disk. Returns which were written.

        `prefixes` identify the content at the next start if the disk file is kept; None for a swapped-out request's own
        blocks.
        """

    def load_from_disk(self, disk_slots: Sequence[int], slots: Sequence[int]) -> list[bool]:
        """Copy slots on disk to slots in host memory. Returns which were read intact; the others are lost."""

    def flush(self) -> None:
        """Complete all copies, in the order of the device: what runs next may write to the blocks."""

    def swap_seconds(self, num_blocks: int) -> float:
        """Return the measured time that `num_blocks` blocks take to host memory and back."""

    def load_seconds(self, num_blocks: int, num_from_disk: int) -> float:
        """Return the measured time that `num_blocks` blocks take to the pool, `num_from_disk` of them from disk."""

    def forget_prefixes(self) -> None:
        """Ensure that the present content of the disk is not found at the next start."""

    def recovered(self) -> Sequence[tuple[int, Prefix]]:
        """Return the slots on disk that hold something from before this start, with their prefixes."""
