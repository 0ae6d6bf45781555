"""Simulated block mover: copies nothing, counts blocks and computes how long the run waits for their transfers
(`policy.kv_offload`).

The timing is that of the engine's mover on a GPU. Copies to and from host memory share one PCIe link and run one after
another. The forward pass overlaps with saves, except those that exceed the staging buffers, and waits for loads. Writes
to disk happen in the background while the queue has capacity. The step waits for reads from disk, which do not slow
down writes. Owns the transfers in progress; the run sets the clock (`start_step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_engine.simulator.costs.cost_model import CostModel
from kvscope_telemetry.ledger import Tier

STAGING_BYTES: Final = 64 << 20
"""Maximum bytes of saves that overlap with the forward pass: the size of the engine's two staging buffers."""
QUEUE_BYTES: Final = 256 << 20
"""Capacity in bytes of the queue of blocks to be written to disk, as in the engine."""


@dataclass(slots=True)
class MoveTotals:
    saved_blocks: int = 0
    """Blocks copied to host memory."""
    loaded_blocks: int = 0
    offloaded_blocks: int = 0
    """Blocks copied from host memory to disk. (`SchedulerTotals.offloaded_blocks` counts those copied from the pool to
    a lower tier.)
    """
    loaded_disk_blocks: int = 0
    """Blocks read from disk to host memory on the way to the pool."""
    save_ns: int = 0
    load_ns: int = 0
    offload_ns: int = 0
    load_from_disk_ns: int = 0


class SimulatedMover:
    failure: Final = ""
    """Always empty: the simulated disk never fails."""

    def __init__(self, cost: CostModel, block_bytes: int, *, has_disk: bool) -> None:
        self.has_disk: Final = has_disk
        self.now_ns = 0
        self.moved = MoveTotals()
        self.origins: dict[int, Tier] = {}
        """Tier from which each block of the pool was loaded in this step, by block number."""
        self._link = _TransferQueue(cost.host_bandwidth / block_bytes)
        self._reading = _TransferQueue(cost.disk_bandwidth / block_bytes)
        self._writing = _TransferQueue(cost.disk_write_bandwidth / block_bytes)
        self._staging_blocks = STAGING_BYTES / block_bytes
        self._queue_blocks = QUEUE_BYTES / block_bytes
        self._num_to_save = 0
        self._num_to_load = 0
        self._slots_from_disk: set[int] = set()  # host slots that hold blocks read from disk

    def start_step(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.origins.clear()

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._num_to_save += len(blocks)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._num_to_load += len(blocks)
        for slot, block in zip(slots, blocks, strict=True):
            self.origins[block] = Tier.DISK if slot in self._slots_from_disk else Tier.HOST
        self._slots_from_disk.difference_update(slots)

    def offload(self, slots: Sequence[int], disk_slots: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[bool]:
        """Copy slots in host memory to disk; always succeeds."""
        assert self.has_disk or not slots, "there is no disk to offload to"
        self.moved.offloaded_blocks += len(slots)
        self._writing.add(self.now_ns, len(slots))
        self.moved.offload_ns += self._wait(self._writing, self._queue_blocks)
        return [True] * len(slots)

    @property
    def num_offloadable(self) -> int:
        behind_s = max(0, self._writing.free_ns - self.now_ns) / 1e9
        return max(0, int(self._queue_blocks - behind_s * self._writing.blocks_per_s))

    def load_from_disk(self, disk_slots: Sequence[int], slots: Sequence[int]) -> list[bool]:
        """Copy slots on disk to host memory; always succeeds."""
        self.moved.loaded_disk_blocks += len(slots)
        self._slots_from_disk.update(slots)
        self._reading.add(self.now_ns, len(slots))
        self.moved.load_from_disk_ns += self._wait(self._reading)
        return [True] * len(slots)

    def flush(self) -> None:
        """Start all requested copies between pool and host memory, and advance the clock by the time for which
        the step waits for them.
        """
        saves, loads = self._num_to_save, self._num_to_load
        self._num_to_save = self._num_to_load = 0
        moved = self.moved
        if saves:
            moved.saved_blocks += saves
            self._link.add(self.now_ns, saves)
            moved.save_ns += self._wait(self._link, self._staging_blocks)
        if loads:
            moved.loaded_blocks += loads
            self._link.add(self.now_ns, loads)
            moved.load_ns += self._wait(self._link)

    def swap_seconds(self, num_blocks: int) -> float:
        return 2 * num_blocks / self._link.blocks_per_s

    def load_seconds(self, num_blocks: int, num_from_disk: int) -> float:
        return num_blocks / self._link.blocks_per_s + num_from_disk / self._reading.blocks_per_s

    def forget_prefixes(self) -> None:
        """Do nothing: a simulated disk is never read by a later run."""

    def recovered(self) -> list[tuple[int, Prefix]]:
        return []

    def _wait(self, queue: _TransferQueue, max_left: float = 0.0) -> int:
        """Advance the clock until at most `max_left` blocks of `queue` remain to be transferred. Returns the
        time waited, in ns.
        """
        waited_ns = max(0, queue.free_ns - round(max_left / queue.blocks_per_s * 1e9) - self.now_ns)
        self.now_ns += waited_ns
        return waited_ns


class _TransferQueue:
    def __init__(self, blocks_per_s: float) -> None:
        self.blocks_per_s = blocks_per_s
        self.free_ns = 0
        """Time at which all requested transfers are complete."""

    def add(self, now_ns: int, num_blocks: int) -> None:
        self.free_ns = max(self.free_ns, now_ns) + round(num_blocks / self.blocks_per_s * 1e9)
