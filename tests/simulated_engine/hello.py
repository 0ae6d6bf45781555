"""The Hello of a simulated engine."""

from __future__ import annotations

import time

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo
from kvscope_telemetry.transport.host_id import host_id

BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 30 * 2 * 3 * 64 * 4
READ_BYTES_PER_S = 4_000_000_000_000
FLOPS_PER_S = 800_000_000_000_000


def simulated_hello(epoch: int, pool: BlockPool, scheduler: Scheduler, now_ns: int) -> Hello:
    """Return the first message of the engine that has `pool` and `scheduler`."""
    return Hello(
        epoch=epoch,
        time_ns=now_ns,
        wall_time_ns=time.time_ns(),
        model=ModelInfo(name="simulated", architecture="none", dtype="float32", num_layers=30),
        cache=CacheInfo(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            block_bytes=BLOCK_BYTES,
            dtype="float32",
            prefix_caching=True,
            has_parents=True,
            num_host_blocks=pool.num_host,
            num_disk_blocks=pool.num_disk,
        ),
        device=DeviceInfo(kind="cpu", name="simulated", read_bytes_per_s=READ_BYTES_PER_S, flops_per_s=FLOPS_PER_S),
        engine_version="simulated",
        host=host_id(),
        capabilities=Capabilities(allocator_map=True, eviction_order=True),
    )
