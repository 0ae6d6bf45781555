"""A mover that copies nothing: it counts blocks and says how long the run waits for them (`policy.tier_mover`).

It takes its time as the engine's does on a GPU. Saves and loads share one link to host memory, one after the other;
the forward pass runs beside saves, but for those that do not fit the staging buffers any more, and waits for loads.
What goes to disk is written in the background while the queue has room; reading from disk is waited for, and does
not slow writing down. Owns what is under way on link and disk; the clock is the run's, and is told it (`begin`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_engine.simulator.costs.cost_model import CostModel
from kvscope_telemetry.ledger import Tier

STAGING_BYTES: Final = 64 << 20
"""Of saves that are under way while the forward pass runs: the engine's two staging buffers."""
QUEUE_BYTES: Final = 256 << 20
"""Of blocks on their way to disk: the engine's queue."""


@dataclass(slots=True)
class MoveTotals:
    """Since the start: blocks, and how long the run stood still for them."""

    saved_blocks: int = 0
    """To host memory."""
    loaded_blocks: int = 0
    """To the pool, from whichever tier."""
    offloaded_blocks: int = 0
    """From host memory to disk."""
    risen_blocks: int = 0
    """From disk to host memory, on their way up."""
    save_ns: int = 0
    load_ns: int = 0
    offload_ns: int = 0
    rise_ns: int = 0


class SimulatedMover:
    """Moves blocks of `block_bytes` at the rates of `cost`."""

    failure: Final = ""
    """The simulated disk never fails."""

    def __init__(self, cost: CostModel, block_bytes: int, *, has_disk: bool) -> None:
        self.has_disk: Final = has_disk
        self.now_ns = 0
        """The clock, moved by what was waited for."""
        self.moved = MoveTotals()
        self.origins: dict[int, Tier] = {}
        """Blocks of the pool that were loaded in this step, and where from."""
        self._link = _Lane(cost.host_bandwidth / block_bytes)
        self._reading = _Lane(cost.disk_bandwidth / block_bytes)
        self._writing = _Lane(cost.disk_write_bandwidth / block_bytes)
        self._staging_blocks = STAGING_BYTES / block_bytes
        self._queue_blocks = QUEUE_BYTES / block_bytes
        self._num_to_save = 0
        self._num_to_load = 0
        self._risen: set[int] = set()  # host places that hold what came from disk

    def begin(self, now_ns: int) -> None:
        """A step begins now."""
        self.now_ns = now_ns
        self.origins.clear()

    def save(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Blocks of the pool to places in host memory."""
        self._num_to_save += len(blocks)

    def load(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Places in host memory to blocks of the pool."""
        self._num_to_load += len(blocks)
        for place, block in zip(places, blocks, strict=True):
            self.origins[block] = Tier.DISK if place in self._risen else Tier.HOST
        self._risen.difference_update(places)

    def offload(
        self, places: Sequence[int], disk_places: Sequence[int], prefixes: Sequence[Prefix | None]
    ) -> list[bool]:
        """Places in host memory to places on disk: all of them arrive."""
        assert self.has_disk or not places, "there is no disk to offload to"
        self.moved.offloaded_blocks += len(places)
        self._writing.add(self.now_ns, len(places))
        self.moved.offload_ns += self._wait(self._writing, self._queue_blocks)
        return [True] * len(places)

    @property
    def num_offloadable(self) -> int:
        """How many places `offload` takes now without waiting for the drive."""
        behind_s = max(0, self._writing.free_ns - self.now_ns) / 1e9
        return max(0, int(self._queue_blocks - behind_s * self._writing.blocks_per_s))

    def rise(self, disk_places: Sequence[int], places: Sequence[int]) -> list[bool]:
        """Places on disk to places in host memory: all of them come back whole."""
        self.moved.risen_blocks += len(places)
        self._risen.update(places)
        self._reading.add(self.now_ns, len(places))
        self.moved.rise_ns += self._wait(self._reading)
        return [True] * len(places)

    def flush(self) -> None:
        """Hand all that was asked for to the link; wait for what the step needs."""
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
        """The time that `num_blocks` blocks take to host memory and back."""
        return 2 * num_blocks / self._link.blocks_per_s

    def load_seconds(self, num_blocks: int, num_from_disk: int) -> float:
        """The time that `num_blocks` blocks take to the pool, `num_from_disk` of them from disk."""
        return num_blocks / self._link.blocks_per_s + num_from_disk / self._reading.blocks_per_s

    def forget_prefixes(self) -> None:
        """There is no next start."""

    def kept(self) -> list[tuple[int, Prefix]]:
        """Nothing is from before."""
        return []

    def _wait(self, lane: _Lane, ahead: float = 0.0) -> int:
        """Stand still until no more than `ahead` blocks are left on the lane; returns for how long."""
        waited_ns = max(0, lane.free_ns - round(ahead / lane.blocks_per_s * 1e9) - self.now_ns)
        self.now_ns += waited_ns
        return waited_ns


class _Lane:
    """Does one thing after the other, beside the run."""

    def __init__(self, blocks_per_s: float) -> None:
        self.blocks_per_s = blocks_per_s
        self.free_ns = 0
        """When all that was asked for is done."""

    def add(self, now_ns: int, num_blocks: int) -> None:
        self.free_ns = max(self.free_ns, now_ns) + round(num_blocks / self.blocks_per_s * 1e9)
