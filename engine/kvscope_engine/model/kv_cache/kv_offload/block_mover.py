"""Moves the bytes of blocks between the pool, host memory and disk; implements
`policy.kv_offload.mover_protocol.TierMover`.

Owns the order between copies: before the disk tier accesses a host slot, the device's copies from and to the slot must
be complete. Must not depend on the contents of slots. Slots of host memory and of the disk file are called `slots` and
`disk_slots` in signatures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

from kvscope_engine.model.device_memory.host_slab import HostSlab, torch_pinned_bytes
from kvscope_engine.model.distributed.rank import Rank
from kvscope_engine.model.kv_cache.kv_offload.block_copies import BlockCopier
from kvscope_engine.model.kv_cache.kv_offload.disk_tier import DiskTier
from kvscope_engine.model.kv_cache.kv_offload.tier_stats import TierStats
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_telemetry.errors import EngineDead

MoveKind: TypeAlias = Literal["save", "load", "offload", "load_from_disk", "flush", "drain"]


class OtherMovers(Protocol):
    """Forwards each move to the block movers of the other ranks, which store the other heads of the same blocks.

    Implemented in `executor.leader`.
    """

    rank: Rank

    def move_blocks(
        self,
        how: MoveKind,
        sources: Sequence[int] = (),
        targets: Sequence[int] = (),
    ) -> None: ...

    def moved_on_all_ranks(self, succeeded: Sequence[bool]) -> list[bool]:
        """Return, per block, whether the last `offload`, `load_from_disk` or `drain` succeeded on all ranks.

        `succeeded` is the result on this rank.
        """


class BlockMover:
    """Moves blocks between tiers. Owns the copies, the host memory and the disk tier.

    Args:
        salt: Salt with which the prefixes in a persistent file were hashed; None without such a file.
        others: The block movers of the other ranks. Each move is sent to them before it runs on this rank, so that all
            ranks run it concurrently.
    """

    def __init__(
        self,
        copier: BlockCopier,
        slab: HostSlab,
        disk: DiskTier | None,
        salt: bytes | None,
        note: str,
        others: OtherMovers | None = None,
    ) -> None:
        self._others = others
        self._copier = copier
        self._slab = slab
        self._disk = disk
        self._rows = slab.rows.numpy()
        self._closed = False
        self.copy_failure = ""
        """Why blocks may not be where the ledger records them, so that the engine must stop; empty while all copies
        have succeeded.
        """
        self.salt = salt
        """Salt with which the prefixes in a persistent file were hashed; None if any salt may be used."""
        self.note = note
        """One line about options that could not be applied as requested; empty if there are none."""
        self.num_host_slots, self._block_bytes = self._rows.shape
        self.num_disk_slots = disk.num_slots if disk is not None else 0

    @property
    def has_disk(self) -> bool:
        """Whether the disk tier can be written. False permanently once a write failed (disk full, file removed)."""
        return self._disk is not None and not self._disk.failure

    @property
    def failure(self) -> str:
        """Why the disk tier can no longer be written; empty if it can."""
        return self._disk.failure if self._disk is not None else ""

    @property
    def num_offloadable(self) -> int:
        """Number of blocks that `offload` accepts without waiting for the drive."""
        return self._disk.num_offloadable if self._disk is not None else 0

    @property
    def is_persistent(self) -> bool:
        return self.salt is not None and self.has_disk and not self.copy_failure

    def forget_prefixes(self) -> None:
        """Exclude the current contents of the disk tier from the index for the next start."""
        if self._disk is not None:
            self._disk.forget_prefixes()

    def recovered(self) -> list[tuple[int, Prefix]]:
        """Return (disk slot, prefix) for each prefix that an earlier run left in a persistent file."""
        return self._disk.recovered() if self._disk is not None else []

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        with self._moving():
            if self._others is not None and blocks:
                self._others.move_blocks("save", blocks, slots)
            self._copier.save(blocks, slots)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        with self._moving():
            if self._others is not None and blocks:
                self._others.move_blocks("load", slots, blocks)
            self._copier.load(slots, blocks)

    def offload(self, slots: Sequence[int], disk_slots: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[bool]:
        """Write host slots to disk slots. Returns, per slot, whether it was accepted on all ranks."""
        with self._moving():
            if self._disk is None:
                return [False] * len(slots)
            if self._others is not None:
                self._others.move_blocks("offload", slots, disk_slots)
            self._copier.await_copies(slots)
            is_written = self._disk.offload([self._rows[slot] for slot in slots], disk_slots, prefixes)
            return is_written if self._others is None else self._others.moved_on_all_ranks(is_written)

    def load_from_disk(self, disk_slots: Sequence[int], slots: Sequence[int]) -> list[bool]:
        """Read disk slots into host slots. Returns, per slot, whether its block was intact on all ranks; blocks that
        were not are lost.
        """
        with self._moving():
            if self._disk is None:
                return [False] * len(slots)
            if self._others is not None:
                self._others.move_blocks("load_from_disk", disk_slots, slots)
            self._copier.await_copies(slots)
            is_intact = self._disk.load_from_disk(disk_slots, [self._rows[slot] for slot in slots])
            return is_intact if self._others is None else self._others.moved_on_all_ranks(is_intact)

    def flush(self) -> None:
        """Enqueue all pending copies on the device, so that work enqueued later may overwrite the blocks."""
        with self._moving():
            if self._others is not None:
                self._others.move_blocks("flush")
            self._copier.flush()

    def drain(self) -> bool:
        """Wait until all offloaded blocks are on disk, for measurements. Returns whether writing succeeded on all
        ranks.
        """
        self._check_open()
        if self._disk is None:
            return True
        if self._others is not None:
            self._others.move_blocks("drain")
        is_drained = self._disk.drain()
        return is_drained if self._others is None else all(self._others.moved_on_all_ranks((is_drained,)))

    def swap_seconds(self, num_blocks: int) -> float:
        """Return the estimated seconds for copying `num_blocks` blocks to host memory and back."""
        self._copier.measure()
        return num_blocks * (self._copier.saving.seconds_per_block + self._copier.loading.seconds_per_block)

    def load_seconds(self, num_blocks: int, num_from_disk: int) -> float:
        """Return the estimated seconds for loading `num_blocks` blocks into the pool from lower tiers, `num_from_disk`
        of them from disk.
        """
        self._copier.measure()
        from_disk = self._disk.read_seconds_per_block if self._disk is not None else 0.0
        return num_blocks * self._copier.loading.seconds_per_block + num_from_disk * from_disk

    @property
    def stats(self) -> TierStats:
        """Totals since the start. Bytes are summed over all ranks, seconds are those of this rank."""
        saving, loading, disk, count = self._copier.saving, self._copier.loading, self._disk, self._num_ranks
        size = self._block_bytes * count
        return TierStats(
            saved_bytes=saving.num_blocks * size,
            saved_seconds=saving.seconds,
            loaded_bytes=loading.num_blocks * size,
            loaded_seconds=loading.seconds,
            disk_written_bytes=disk.num_written * size if disk is not None else 0,
            disk_write_seconds=disk.write_seconds if disk is not None else 0.0,
            disk_read_bytes=disk.num_read * size if disk is not None else 0,
            disk_read_seconds=disk.read_seconds if disk is not None else 0.0,
            num_lost=disk.num_lost if disk is not None else 0,
            host_requested_bytes=self._slab.num_bytes * count,
            host_real_bytes=self._slab.real_bytes * count,
            host_is_pinned=self._slab.is_pinned,
            torch_pinned_bytes=torch_pinned_bytes(self._slab.num_bytes) * count,
            disk_is_direct=disk is not None and disk.is_direct,
        )

    def close(self) -> str:
        """Free everything, after writing the index of a persistent file. Returns one line about a failure, or an empty
        string.

        After a `copy_failure`, the index lists no blocks, so that the next start uses none.
        """
        if self._closed:
            return ""
        self._closed = True
        with contextlib.suppress(Exception) if self.copy_failure else contextlib.nullcontext():
            self._copier.close()
        if self.copy_failure:
            self.forget_prefixes()
        note = self._disk.close() if self._disk is not None else ""
        del self._rows
        self._slab.close()
        return note

    @property
    def _num_ranks(self) -> int:
        return 1 if self._others is None else self._others.rank.count

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Return a context in which an exception is recorded as `copy_failure`.

        The caller's ledger has recorded the move already or is about to, so a failed move cannot be undone.
        """
        self._check_open()
        if self.copy_failure:
            raise EngineDead(self.copy_failure)
        try:
            yield
        except Exception as error:
            self.copy_failure = f"blocks of the KV cache could not be copied between the tiers: {error!r:.200}"
            raise

    def _check_open(self) -> None:
        assert not self._closed, "the tiers are closed"
