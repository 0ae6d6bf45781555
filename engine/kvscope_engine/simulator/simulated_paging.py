"""Divides a simulated cache into physical pages, for the allocator `virtual`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_engine.policy.allocation.address_space import MIB, AddressSpace, address_space
from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_telemetry.errors import BadInput

MAX_LAYERS: Final = 1 << 12
MIN_PAGE_BYTES: Final = 1 << 12
MAX_PAGE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class SimulatedPaging:
    """Pages of a cache that has one tensor of keys and values per layer. Raises BadInput for values out of range."""

    num_layers: int = 1
    page_bytes: int = 2 * MIB
    """Bytes per physical page. Default: the smallest page that CUDA's driver maps."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise BadInput(
                f"num_layers={self.num_layers} is not accepted: must be a whole number from 1 to {MAX_LAYERS}"
            )
        page = self.page_bytes
        if not MIN_PAGE_BYTES <= page <= MAX_PAGE_BYTES or page & (page - 1):
            raise BadInput(
                f"page_size={page} is not accepted: must be a power of two from {MIN_PAGE_BYTES} to {MAX_PAGE_BYTES}"
            )

    def space(self, limits: SimulatedLimits, kv_bytes_per_token: float) -> AddressSpace:
        """Return the address space of a pool with these limits. Raises BadInput if the pool is too small for pages."""
        layer_bytes = max(1, round(kv_bytes_per_token / self.num_layers * limits.block_size))
        return address_space(
            block_bytes=(layer_bytes,) * self.num_layers,
            page_bytes=self.page_bytes,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
        )
