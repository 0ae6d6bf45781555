"""The Hello of the synthetic engine."""

from __future__ import annotations

import time

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo
from kvscope_telemetry.sockets.host_id import host_id

BLOCK_TOKENS = 16
READ_BYTES_PER_S = 4_000_000_000_000
FLOPS_PER_S = 800_000_000_000_000
BLOCK_BYTES = BLOCK_TOKENS * 30 * 2 * 3 * 64 * 4


def synthetic_hello(
    epoch: int, num_blocks: int, block_size: int, now_ns: int, num_host_blocks: int, num_disk_blocks: int
) -> Hello:
    """The first message. Raises BadInput for tiers of less than nothing."""
    _check_sizes(num_host_blocks, num_disk_blocks)
    return Hello(
        epoch=epoch,
        time_ns=now_ns,
        wall_time_ns=time.time_ns(),
        model=ModelInfo(name="synthetic", architecture="none", dtype="float32", num_layers=30),
        cache=CacheInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            block_bytes=BLOCK_BYTES,
            dtype="float32",
            prefix_caching=True,
            has_parents=True,
            num_host_blocks=num_host_blocks,
            num_disk_blocks=num_disk_blocks,
        ),
        device=DeviceInfo(kind="cpu", name="synthetic", read_bytes_per_s=READ_BYTES_PER_S, flops_per_s=FLOPS_PER_S),
        engine_version="synthetic",
        host=host_id(),
        capabilities=Capabilities(allocator_map=True),
    )


def _check_sizes(num_host_blocks: int, num_disk_blocks: int) -> None:
    if num_host_blocks < 0 or num_disk_blocks < 0:
        raise BadInput(f"{num_host_blocks} host and {num_disk_blocks} disk blocks: 0 or more of each are accepted")
