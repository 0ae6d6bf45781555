"""Breakdown of the device's memory into parts that do not overlap. Imports no Qt.

Values that were not measured are None and shown as unknown, never as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvscope_app.ui.number_text import num_bytes
from kvscope_app.views.memory.device_use import device_use
from kvscope_app.views.memory.memory_part import MemoryPart
from kvscope_app.views.memory.workspace import workspace_parts
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceSample, MemoryBreakdown
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.pool_use import PoolUse, pool_use

_ACCOUNTED_KEYS: Final = ("weights", "kv_active", "kv_cached", "kv_free")
"""Keys of the parts that must be known before the unattributed memory can be computed."""
_UNATTRIBUTED_MEANING: Final = (
    "Memory of the engine's process beyond the parts above, as reported by the driver or system: "
    "libraries, the program itself, and anything uncounted. Negative when reserved parts are not backed by "
    "memory yet"
)


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    parts: tuple[MemoryPart, ...]
    total_bytes: int | None

    @property
    def whole_bytes(self) -> int:
        """Bytes that the full bar represents: the device's size or, if that is unknown, the sum of the known parts."""
        known_bytes = sum(max(part.num_bytes or 0, 0) for part in self.parts)
        return max(self.total_bytes or 0, known_bytes, 1)

    def share(self, part: MemoryPart) -> float | None:
        if part.num_bytes is None or not self.total_bytes:
            return None
        return part.num_bytes / self.total_bytes


def memory_account(
    mirror: Mirror, memory: MemoryBreakdown | None, sample: DeviceSample | None, devices: Devices | None = None
) -> MemoryAccount:
    """Return the current breakdown of the device's memory.

    The difference between the engine's own accounting and the memory that the driver or system reports is listed as the
    part "Unattributed", so that the parts add up to the total.
    """
    use = device_use(mirror.hello, devices, sample)
    block_bytes = mirror.hello.cache.block_bytes if mirror.hello else 0
    kv = [count * block_bytes if block_bytes and count is not None else None for count in block_counts(mirror)]
    host = host_tier_bytes(mirror)
    parts = [
        MemoryPart("weights", "Weights", memory.weights_bytes if memory else None, "weights", _weights_meaning(memory)),
        MemoryPart("kv_active", "KV in use", kv[0], "block_active", "Blocks held by requests"),
        MemoryPart(
            "kv_cached", "KV cached", kv[1], "block_cached", "Blocks not held, kept for prompts with the same prefix"
        ),
        MemoryPart("kv_free", "KV free", kv[2], "kv_free", "Empty blocks, reserved by the pool"),
        *_state_parts(mirror),
        *(
            [
                MemoryPart(
                    "kv_host", "KV host tier", host, TIER_STYLES[Tier.HOST].color, "Blocks and recurrent states there"
                )
            ]
            if host
            else []
        ),
        *workspace_parts(memory),
    ]
    accounted = sum(part.num_bytes or 0 for part in parts)
    is_available = memory is not None and all(
        part.num_bytes is not None for part in parts if part.key in _ACCOUNTED_KEYS
    )
    unattributed = use.used_by_engine - accounted if use.used_by_engine is not None and is_available else None
    parts += [
        MemoryPart("other", "Unattributed", unattributed, "other", _UNATTRIBUTED_MEANING),
        MemoryPart("others", "Other processes", use.others, "others", "All other processes on this device"),
        *(
            [MemoryPart("driver", "Driver", use.reserved, "driver", "Reserved by driver and firmware")]
            if use.reserved
            else []
        ),
        MemoryPart("free", "Free on device", use.free, "free", "Unused"),
    ]
    return MemoryAccount(tuple(parts), use.total)


@dataclass(frozen=True, slots=True)
class KVDetail:
    block_size: int
    block_bytes: int
    use: PoolUse
    num_saved_blocks: int
    """Number of additional blocks that requests would need without block sharing."""
    resident_bytes: int | None = None
    """Measured bytes of physical memory behind the blocks. None unless the engine's allocator is `virtual`,
    which measures them.
    """
    dtype: str = ""
    allocator: str = ""
    capabilities: Capabilities = OWN_ENGINE

    @property
    def token_bytes(self) -> float | None:
        """KV bytes of one token over all layers, or None if the block's size in bytes is unknown."""
        return self.block_bytes / self.block_size if self.block_bytes and self.block_size else None

    @property
    def saved_bytes(self) -> int | None:
        """Bytes that sharing of blocks saves, or None if the block's size in bytes is unknown."""
        return self.num_saved_blocks * self.block_bytes if self.block_bytes else None


def kv_detail(mirror: Mirror, memory: MemoryBreakdown | None = None) -> KVDetail:
    """Return the use of the device's block pool, without lower tiers. Takes O(blocks)."""
    cache = mirror.hello.cache if mirror.hello else CacheInfo(num_blocks=0, block_size=0)
    ref_count = mirror.ledger.ref_count[: mirror.num_blocks]
    shared = ref_count[(ref_count > 1).nonzero()[0]]
    return KVDetail(
        block_size=cache.block_size,
        block_bytes=cache.block_bytes,
        use=pool_use(mirror),
        num_saved_blocks=int(shared.sum(dtype=np.int64)) - shared.size,
        resident_bytes=_known(memory.kv_resident_bytes) if memory else None,
        dtype=cache.dtype,
        allocator=cache.allocator,
        capabilities=mirror.capabilities,
    )


def host_tier_bytes(mirror: Mirror) -> int:
    """Return the bytes of the device's memory that the host tier uses, which is 0 unless the device is a CPU."""
    if mirror.hello is None or mirror.hello.device.kind != "cpu":
        return 0
    cache = mirror.hello.cache
    return cache.host_tier_bytes


def _state_parts(mirror: Mirror) -> list[MemoryPart]:
    if mirror.hello is None or not mirror.hello.cache.num_states:
        return []
    kinds = (
        (BlockState.ACTIVE, "states_active", "States in use", "block_active", "Recurrent states of running requests"),
        (
            BlockState.CACHED,
            "states_kept",
            "States cached",
            "block_cached",
            "Kept for prompts with the same prefix",
        ),
        (BlockState.FREE, "states_free", "States free", "kv_free", "Room for further recurrent states"),
    )
    size = mirror.hello.cache.state_bytes or None
    counts = {state: mirror.count(state, Tier.STATES) for state, *_ in kinds}
    return [
        MemoryPart(key, text, size and counts[state] * size, color, meaning)
        for state, key, text, color, meaning in kinds
    ]


def block_counts(mirror: Mirror) -> tuple[int | None, int | None, int | None]:
    """Return the numbers of active, cached and free blocks, None where unknown.

    On a CPU, free blocks that were never touched are left out, because they have no physical memory yet. On a GPU, all
    memory of the pool is allocated at startup.
    """
    if not mirror.capabilities.free_rows:
        return round(mirror.used_share * mirror.num_blocks) if mirror.used_share >= 0 else None, None, None
    is_gpu = mirror.hello is not None and mirror.hello.device.kind == "cuda"
    return mirror.num_active, mirror.num_cached, mirror.num_available_blocks if is_gpu else mirror.num_free


def _known(value: int) -> int | None:
    return value if value >= 0 else None


def _weights_meaning(memory: MemoryBreakdown | None) -> str:
    parts = [f"{part.name} {num_bytes(part.num_bytes)}" for part in memory.modules] if memory else []
    return "\n".join(["The model's parameters", *parts])
