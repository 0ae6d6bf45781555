"""Where the memory went, as an account: absolute bytes of parts that do not overlap. No Qt.

What nobody measured is None and is shown as unknown, never as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceSample, MemoryBreakdown
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.state.pool_use import PoolUse, pool_use


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the device's memory. `color` names a colour of the theme."""

    key: str
    label: str
    num_bytes: int | None
    color: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Account:
    """The parts, and the device's whole memory."""

    parts: tuple[Part, ...]
    total_bytes: int | None

    @property
    def whole_bytes(self) -> int:
        """What the bar's length stands for: the device, or the known parts when its size is unknown."""
        known = sum(part.num_bytes or 0 for part in self.parts)
        return max(self.total_bytes or 0, known, 1)

    def share(self, part: Part) -> float | None:
        """The part's share of the device; None when either is unknown."""
        if part.num_bytes is None or not self.total_bytes:
            return None
        return part.num_bytes / self.total_bytes


def account(mirror: Mirror, memory: MemoryBreakdown | None, sample: DeviceSample | None) -> Account:
    """What is known of the device's memory now."""
    weights = memory.weights_bytes if memory else None
    workspace = _known(memory.workspace_bytes) if memory else None
    used, process = (_known(sample.memory_used_bytes), _known(sample.process_bytes)) if sample else (None, None)
    total = _total(mirror, sample)
    block_bytes = mirror.hello.cache.block_bytes if mirror.hello else 0
    kv = [count * block_bytes if block_bytes else None for count in _block_counts(mirror)]
    host = host_tier_bytes(mirror)
    owned = (weights, *kv, workspace or 0, host)
    parts = (
        Part("weights", "Weights", weights, "weights", "The model's parameters"),
        Part("kv_active", "KV in use", kv[0], "block_active", "Blocks that a request holds"),
        Part(
            "kv_cached",
            "KV cached",
            kv[1],
            "block_cached",
            "Blocks nobody holds, kept for prompts that begin the same",
        ),
        Part(
            "kv_free",
            "KV free",
            kv[2],
            "kv_free",
            "Blocks that hold nothing: reserved by the pool, ready to use",
        ),
        *([Part("kv_host", "KV host tier", host, "block_host", "All places of the host tier")] if host else []),
        Part("workspace", "Workspace", workspace, "workspace", "Activations, graphs and buffers"),
        Part(
            "other",
            "Other, engine",
            _rest(process, *owned),
            "other",
            "The engine's process beyond the parts above",
        ),
        Part("others", "Other processes", _rest(used, process), "others", "Everybody else on this device"),
        Part("free", "Free on device", _rest(total, used), "free", "Nobody uses it"),
    )
    return Account(parts, total)


@dataclass(frozen=True, slots=True)
class KVDetail:
    """How well the pool's blocks are used. Tokens, slots and blocks are counts."""

    block_size: int
    block_bytes: int
    use: PoolUse
    num_saved_blocks: int
    """Blocks that would be needed more if nothing were shared."""
    resident_bytes: int | None = None
    """Memory behind blocks now, measured (allocator `virtual`)."""
    dtype: str = ""
    allocator: str = ""

    @property
    def token_bytes(self) -> float | None:
        """KV of one token over all layers; None when the engine does not tell a block's size."""
        return self.block_bytes / self.block_size if self.block_bytes and self.block_size else None

    @property
    def saved_bytes(self) -> int | None:
        """Memory that sharing saves; None when the engine does not tell a block's size."""
        return self.num_saved_blocks * self.block_bytes if self.block_bytes else None


def kv_detail(mirror: Mirror, memory: MemoryBreakdown | None = None) -> KVDetail:
    """Of the pool alone, read from the ledger, O(blocks)."""
    cache = mirror.hello.cache if mirror.hello else CacheInfo(num_blocks=0, block_size=0)
    ref_count = mirror.ledger.ref_count[: mirror.num_blocks]
    return KVDetail(
        block_size=cache.block_size,
        block_bytes=cache.block_bytes,
        use=pool_use(mirror),
        num_saved_blocks=int(ref_count.sum(dtype=np.int64)) - int(np.count_nonzero(ref_count)),
        resident_bytes=_known(memory.kv_resident_bytes) if memory else None,
        dtype=cache.dtype,
        allocator=cache.allocator,
    )


def host_tier_bytes(mirror: Mirror) -> int:
    """What the host tier takes of the device's memory: something where that is the host's, on a CPU."""
    if mirror.hello is None or mirror.hello.device.kind != "cpu":
        return 0
    return mirror.hello.cache.num_host_blocks * mirror.hello.cache.block_bytes


def _block_counts(mirror: Mirror) -> tuple[int, int, int]:
    """Active, cached and free blocks. Pages are all made at the start on a GPU, and on a CPU when they are touched:
    there those behind no block take nothing of the device."""
    is_gpu = mirror.hello is not None and mirror.hello.device.kind == "cuda"
    return mirror.num_active, mirror.num_cached, mirror.num_room if is_gpu else mirror.num_free


def _total(mirror: Mirror, sample: DeviceSample | None) -> int | None:
    sampled = _known(sample.memory_total_bytes) if sample else None
    told = mirror.hello.device.total_bytes if mirror.hello else 0
    return sampled or told or None


def _known(value: int) -> int | None:
    """-1 on the wire means unknown."""
    return value if value >= 0 else None


def _rest(whole: int | None, *parts: int | None) -> int | None:
    """What is left of `whole`. Unknown when a term is, and when the parts are more than the whole: a process
    has fewer bytes resident than its KV pool reserves until the pool was touched."""
    if whole is None or any(part is None for part in parts):
        return None
    rest = whole - sum(part or 0 for part in parts)
    return rest if rest >= 0 else None
