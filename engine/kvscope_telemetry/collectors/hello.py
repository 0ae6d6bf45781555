"""Creates the `Hello` message of an external engine from its metrics, facts and capabilities, independent of KV
events.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvscope_telemetry.collectors.cached_rows import CachedRows
from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.server_facts import ServerFacts
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo
from kvscope_telemetry.transport.host_id import host_id

UNKNOWN_DEVICE = "unknown"


def hello_of(
    engine: ExternalEngine,
    epoch: int,
    now_ns: int,
    *,
    slots: CachedRows,
    block_size: int,
    reading: EngineReading,
    facts: ServerFacts,
    are_counters_known: bool = True,
    wall_offset_ns: int,
) -> Hello:
    """Return the current `Hello` message. Its times are the caller's, because the engine does not report any.

    `wall_offset_ns`: nanoseconds to add to the caller's clock for the time since 1970.
    """
    num_blocks = slots.num_rows[Tier.HBM]
    groups = slots.groups.published(block_size)
    num_block_tokens = (reading.num_blocks or 0) * block_size if len(groups) < 2 else 0
    version = f"{engine.name} {facts.version}".strip()
    return Hello(
        epoch=epoch,
        time_ns=now_ns,
        wall_time_ns=now_ns + wall_offset_ns,
        model=ModelInfo(name=facts.model or reading.model, max_model_len=facts.max_model_len),
        cache=CacheInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            block_bytes=(reading.kv_bytes or 0) // (reading.num_blocks or num_blocks),
            dtype=facts.dtype or reading.cache_dtype,
            allocator=UNKNOWN_DEVICE,
            prefix_caching=True,
            num_host_blocks=slots.num_rows[Tier.HOST],
            num_disk_blocks=slots.num_rows[Tier.DISK] + slots.num_rows[Tier.UNKNOWN],
            has_parents=True,
            groups=groups,
            pool_tokens=reading.pool_tokens or facts.num_tokens or num_block_tokens,
        ),
        device=DeviceInfo(kind=UNKNOWN_DEVICE),
        engine_version=version,
        host=host_id(),
        capabilities=replace(
            engine.capabilities,
            aborts=reading.aborted is not None,
            groups=len(groups) > 1,
            counters=are_counters_known,
        ),
    )
