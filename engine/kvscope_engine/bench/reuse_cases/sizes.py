"""Sizes that the cases share: how many places a tier needs, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_engine.model.tiers.disk_records import record_bytes
from kvscope_engine.policy.tiers.lower_tiers import num_bounce
from kvscope_telemetry.engine_config import EngineConfig

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and how a case runs: as the engine found it out for the first engine of a run."""

    model: str
    device: str
    dtype: str
    num_threads: int
    block_bytes: int
    disk_path: str | None
    repeats: int

    def config(
        self, num_blocks: int, *, num_host: int = 0, num_disk: int = 0, caching: bool = True, preemption: str = "auto"
    ) -> EngineConfig:
        """An engine with so many blocks in each tier."""
        return EngineConfig(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            num_threads=self.num_threads,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=caching,
            host_kv_memory_bytes=num_host * self.block_bytes,
            disk_kv_memory_bytes=num_disk * record_bytes(self.block_bytes),
            disk_kv_path=self.disk_path if num_disk else None,
            preemption=preemption,
        )


def with_bounce(num_places: int) -> int:
    """Host places of which exactly `num_places` are left beside those kept free for blocks on their way from disk."""
    count = num_places + 1
    while count - num_bounce(count) < num_places:
        count += 1
    return count
