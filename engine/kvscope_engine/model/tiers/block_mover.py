"""Moves the bytes of blocks between the pool, host memory and disk: the engine's `policy.tier_mover.TierMover`.

Owns the order between them: a place in host memory that the device still copies from or to is settled before the
disk tier reads or writes it. Which place holds what it must not know.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvscope_engine.model.tiers.copies import Copies
from kvscope_engine.model.tiers.disk_tier import DiskTier
from kvscope_engine.model.tiers.host_slab import HostSlab, torch_pinned_bytes
from kvscope_engine.model.tiers.stats import TierStats
from kvscope_engine.policy.prefixes.prefix_index import Prefix


class BlockMover:
    """Owns what it is made of. `salt` is that of a kept file's prefixes, None without one."""

    def __init__(self, copies: Copies, slab: HostSlab, disk: DiskTier | None, salt: bytes | None, note: str) -> None:
        self._copies = copies
        self._slab = slab
        self._disk = disk
        self._rows = slab.rows.numpy()
        self._closed = False
        self.salt = salt
        """What the prefixes of a kept file must be hashed from; None: whatever."""
        self.note = note
        """What is not as it was asked for, in a line; empty when all is."""
        self.num_host_places, self._block_bytes = self._rows.shape
        self.num_disk_places = disk.num_places if disk is not None else 0

    @property
    def has_disk(self) -> bool:
        """Whether the disk tier can be written; False once it failed (full, vanished), for good."""
        return self._disk is not None and not self._disk.failure

    @property
    def failure(self) -> str:
        """Why the disk tier was given up; empty while all is well."""
        return self._disk.failure if self._disk is not None else ""

    @property
    def num_offloadable(self) -> int:
        """How many places `offload` takes now without waiting for the drive."""
        return self._disk.num_offloadable if self._disk is not None else 0

    @property
    def keeps(self) -> bool:
        """Whether what is on disk outlives this process."""
        return self.salt is not None and self.has_disk

    def forget_prefixes(self) -> None:
        """What is on disk now must not be found at the next start."""
        if self._disk is not None:
            self._disk.forget_prefixes()

    def kept(self) -> list[tuple[int, Prefix]]:
        """Places on disk that hold prefixes from an earlier run."""
        return self._disk.kept() if self._disk is not None else []

    def save(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Blocks of the pool to places in host memory."""
        self._check_open()
        self._copies.save(blocks, places)

    def load(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Places in host memory to blocks of the pool."""
        self._check_open()
        self._copies.load(places, blocks)

    def offload(
        self, places: Sequence[int], disk_places: Sequence[int], prefixes: Sequence[Prefix | None]
    ) -> list[bool]:
        """Places in host memory to places on disk; which of them are there now."""
        self._check_open()
        if self._disk is None:
            return [False] * len(places)
        self._copies.settle(places)
        return self._disk.offload([self._rows[place] for place in places], disk_places, prefixes)

    def rise(self, disk_places: Sequence[int], places: Sequence[int]) -> list[bool]:
        """Places on disk to places in host memory; which came back whole. The others are lost."""
        self._check_open()
        if self._disk is None:
            return [False] * len(places)
        self._copies.settle(places)
        return self._disk.rise(disk_places, [self._rows[place] for place in places])

    def flush(self) -> None:
        """Everything was copied, in the order of the device: what runs next may write to the blocks."""
        self._check_open()
        self._copies.flush()

    def drain(self) -> bool:
        """Wait until all that was offloaded is on the drive; whether it is. For measurements: nothing needs it."""
        self._check_open()
        return self._disk is None or self._disk.drain()

    def swap_seconds(self, num_blocks: int) -> float:
        """Measured: the time that `num_blocks` blocks take to host memory and back."""
        self._copies.measure()
        return num_blocks * (self._copies.saving.seconds_per_block + self._copies.loading.seconds_per_block)

    def load_seconds(self, num_blocks: int, num_from_disk: int) -> float:
        """Measured: the time that `num_blocks` blocks take to the pool, `num_from_disk` of them from disk."""
        self._copies.measure()
        from_disk = self._disk.read_seconds_per_block if self._disk is not None else 0.0
        return num_blocks * self._copies.loading.seconds_per_block + num_from_disk * from_disk

    @property
    def stats(self) -> TierStats:
        """What was done since the start."""
        saving, loading, disk, size = self._copies.saving, self._copies.loading, self._disk, self._block_bytes
        return TierStats(
            saved_bytes=saving.num_blocks * size,
            saved_seconds=saving.seconds,
            loaded_bytes=loading.num_blocks * size,
            loaded_seconds=loading.seconds,
            offloaded_bytes=disk.num_written * size if disk is not None else 0,
            offload_seconds=disk.write_seconds if disk is not None else 0.0,
            risen_bytes=disk.num_read * size if disk is not None else 0,
            risen_seconds=disk.read_seconds if disk is not None else 0.0,
            num_lost=disk.num_lost if disk is not None else 0,
            host_asked_bytes=self._slab.num_bytes,
            host_real_bytes=self._slab.real_bytes,
            host_is_pinned=self._slab.is_pinned,
            torch_pinned_bytes=torch_pinned_bytes(self._slab.num_bytes),
            disk_is_direct=disk is not None and disk.is_direct,
        )

    def close(self) -> str:
        """Give everything back, with a kept file's index written; what could not be done, in a line."""
        if self._closed:
            return ""
        self._closed = True
        self._copies.close()
        note = self._disk.close() if self._disk is not None else ""
        del self._rows
        self._slab.close()
        return note

    def _check_open(self) -> None:
        assert not self._closed, "the tiers are closed"
