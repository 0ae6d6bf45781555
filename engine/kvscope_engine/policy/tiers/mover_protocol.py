"""What moves the bytes of blocks between tiers, as the tier bookkeeping (`policy`) sees it. No tensors here.

The engine has one that copies real bytes, the simulator one that counts them, the tests one that checks them.
Calls take effect as if each were over when it returns; an implementation may put off the copying as long as no one
can tell, and must have done it when `flush` returns. Blocks of the pool are ids of the pool; places of a tier are
numbers of that tier, from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvscope_engine.policy.prefixes.prefix_index import Prefix


class TierMover(Protocol):
    """Copies whole blocks, many at once: `sources[i]` to `targets[i]`, no two targets the same.

    Nothing is raised that an engine survives: a tier that fails says so by what it returns, and from then on by
    `has_disk`.
    """

    @property
    def failure(self) -> str:
        """Why the disk tier is not used any more, one line; empty while it is."""

    @property
    def has_disk(self) -> bool:
        """Whether the disk tier can be written; False once it failed (full, vanished), for good."""

    @property
    def num_offloadable(self) -> int:
        """How many places `offload` takes now without waiting for the drive."""

    def save(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Blocks of the pool to places in host memory."""

    def load(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Places in host memory to blocks of the pool."""

    def offload(
        self, places: Sequence[int], disk_places: Sequence[int], prefixes: Sequence[Prefix | None]
    ) -> list[bool]:
        """Places in host memory to places on disk; which of them are there now.

        `prefixes` are what a kept file can be used by at the next start; None for what is a single request's.
        """

    def rise(self, disk_places: Sequence[int], places: Sequence[int]) -> list[bool]:
        """Places on disk to places in host memory; which came back whole. The others are lost."""

    def flush(self) -> None:
        """Everything was copied, in the order of the device: what runs next may write to the blocks."""

    def swap_seconds(self, num_blocks: int) -> float:
        """Measured: the time that `num_blocks` blocks take to host memory and back."""

    def load_seconds(self, num_blocks: int, num_from_disk: int) -> float:
        """Measured: the time that `num_blocks` blocks take to the pool, `num_from_disk` of them from disk."""

    def forget_prefixes(self) -> None:
        """What is on disk now must not be found at the next start."""

    def kept(self) -> Sequence[tuple[int, Prefix]]:
        """Places on disk that hold something from before this start."""
