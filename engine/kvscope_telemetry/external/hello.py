"""The Hello of another engine: what is known of it, and what it can tell. Knows no events."""

from __future__ import annotations

import time

from kvscope_telemetry.external.address import ENGINES
from kvscope_telemetry.external.readings import EngineReading
from kvscope_telemetry.external.server_facts import ServerFacts
from kvscope_telemetry.external.slots import Slots
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo
from kvscope_telemetry.sockets.host_id import host_id

UNKNOWN_DEVICE = "unknown"


def capabilities_of(engine: str, *, aborts: bool = True) -> Capabilities:
    """Cells are slots that kvscope gives out; requests are told by their number alone, latencies as histograms.

    `aborts`: whether its metrics say how many were aborted.
    """
    return Capabilities(
        engine=engine,
        commands=False,
        completions=True,
        physical_rows=False,
        free_rows=False,
        requests=False,
        owners=False,
        ref_counts=False,
        filled=False,
        prefix_hits=False,
        last_used=False,
        token_ids=True,
        steps=False,
        latencies=False,
        aborts=aborts,
    )


def hello_of(
    engine: str,
    epoch: int,
    now_ns: int,
    *,
    slots: Slots,
    block_size: int,
    reading: EngineReading,
    facts: ServerFacts,
) -> Hello:
    """As of now. Times are of this machine: those of the engine are not told."""
    num_blocks = slots.num_rows[Tier.HBM]
    version = f"{ENGINES[engine]} {facts.version}".strip()
    return Hello(
        epoch=epoch,
        time_ns=now_ns,
        wall_time_ns=time.time_ns(),
        model=ModelInfo(name=facts.model or reading.model, max_model_len=facts.max_model_len),
        cache=CacheInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            block_bytes=(reading.kv_bytes or 0) // (reading.num_blocks or num_blocks),
            dtype=facts.dtype or reading.cache_dtype,
            allocator=UNKNOWN_DEVICE,
            prefix_caching=True,
            num_host_blocks=slots.num_rows[Tier.HOST],
            num_disk_blocks=slots.num_rows[Tier.DISK],
            has_parents=True,
        ),
        device=DeviceInfo(kind=UNKNOWN_DEVICE),
        engine_version=version,
        host=host_id(),
        capabilities=capabilities_of(engine, aborts=reading.aborted is not None),
    )
