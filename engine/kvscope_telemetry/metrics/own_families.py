"""Metrics without a vLLM equivalent: blocks by state and tier, bytes, fragmentation, preemption causes, and lost
telemetry.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from prometheus_client.core import Metric

from kvscope_telemetry.messages.telemetry import DeviceSample, MemoryBreakdown
from kvscope_telemetry.metrics.families import Labels, Maker
from kvscope_telemetry.metrics.pool_figures import PoolFigures
from kvscope_telemetry.metrics.tally import Tally
from kvscope_telemetry.source import SourceState, SourceStatus

TIER_GAUGES: Final = {
    "num_blocks": "Total blocks.",
    "num_used": "Blocks held by requests; in a lower tier, those of swapped requests.",
    "num_shared": "Used blocks that several requests share.",
    "num_cached": "Blocks cached for their prefix and held by no request.",
    "num_free": "Free blocks.",
}
"""Help texts by attribute of `TierFigures`."""
TOTALS: Final = {
    "evicted_blocks": "Blocks evicted from the prefix cache.",
    "copied_blocks": "Blocks copied on write.",
    "swapped_blocks": "Blocks of preempted requests swapped to a lower tier.",
    "offloaded_blocks": "Cached blocks moved to a lower tier when evicted.",
    "loaded_blocks": "Blocks loaded from a lower tier.",
    "lost_blocks": "Blocks of a lower tier that could not be read back whole.",
    "swapped_states": "Recurrent states of preempted requests swapped to host memory.",
    "offloaded_states": "Kept recurrent states moved to host memory when evicted.",
    "loaded_states": "Recurrent states loaded from host memory.",
    "restored_tokens": "Tokens that did not have to be recomputed after a preemption.",
    "recomputed_tokens": "Tokens lost by preemptions and recomputed.",
    "admitted": "Requests admitted (scheduled for the first time).",
    "refused": "Requests refused.",
    "messages_dropped": "Telemetry messages dropped because the publisher was behind.",
}
"""Help texts by field of `Counters`."""
TOTAL_NAMES: Final = {
    "swapped_blocks": "swapped_out_blocks",
    "loaded_blocks": "swapped_in_blocks",
    "swapped_states": "swapped_out_states",
    "loaded_states": "swapped_in_states",
    "admitted": "requests_admitted",
    "refused": "requests_refused",
}
"""Metric names by field of `Counters`, for fields whose metric has a different name."""


def counters(make: Maker, tally: Tally) -> Iterator[Metric]:
    """Yield the counters, which remain available while the engine is unreachable."""
    yield make.counter("kvscope_steps", "Engine steps.", ({}, tally.num_steps))
    for field, text in TOTALS.items():
        name = TOTAL_NAMES.get(field, field)
        yield make.counter(f"kvscope_{name}", text, ({}, getattr(tally.counters, field)))
    times = [({"part": part}, took_ns / 1e9) for part, took_ns in tally.step_ns.items()]
    yield make.counter(
        "kvscope_step_seconds",
        "Time of the engine's steps by part, over the steps that this process received.",
        *times,
    )
    causes = [({"cause": cause}, float(count)) for cause, count in tally.preemptions.counts.items()]
    text = "Preemptions by mode; unknown: before this process was connected."
    yield make.counter("kvscope_preemptions", text, *causes)


def gauges(make: Maker, tally: Tally, pool: PoolFigures) -> Iterator[Metric]:
    for field, text in TIER_GAUGES.items():
        name = field if field == "num_blocks" else f"{field}_blocks"
        yield make.gauge(f"kvscope_{name}", text, *_by_tier(pool, field))
    yield make.gauge("kvscope_num_pinned_blocks", "Blocks pinned against eviction.", ({}, pool.num_pinned))
    block_bytes = tally.hello.cache.block_bytes
    if block_bytes:
        yield make.gauge("kvscope_block_bytes", "Bytes of one block over all layers.", ({}, block_bytes))
    if pool.groups:
        yield from _groups(make, tally, pool)
    yield from _fragmentation(make, pool)
    if tally.memory is not None:
        yield make.gauge("kvscope_memory_bytes", "The engine's memory by kind.", *_memory(tally.memory))
    if tally.sample is not None:
        yield from _device(make, tally.sample)


def connection_metrics(make: Maker, status: SourceStatus, *, is_up: bool) -> Iterator[Metric]:
    """Yield the metrics about the connection to the engine, which are available even while the engine is down.

    The counters among them count from the start of the process that serves `/metrics`.
    """
    yield make.gauge("kvscope_up", "1 while the engine reports, 0 while it is away or loading.", ({}, is_up))
    states = [({"state": str(state)}, float(state is status.state)) for state in _STATES]
    yield make.gauge("kvscope_engine_state", "1 for the engine's current state.", *states)
    for name, text, value in (
        ("reader_frames_lost", "Telemetry frames lost.", status.frames_dropped),
        ("reader_resyncs", "Snapshots requested to repair the state.", status.resyncs),
        ("reader_messages_rejected", "Unreadable messages.", status.messages_rejected),
    ):
        yield make.counter(f"kvscope_{name}", text, ({}, value))


_STATES: Final = tuple(state for state in SourceState if state is not SourceState.PLAYBACK)


def _by_tier(pool: PoolFigures, field: str) -> list[tuple[Labels, float]]:
    get = attrgetter(field)
    return [({"tier": tier.tier}, float(get(tier))) for tier in pool.tiers]


def _groups(make: Maker, tally: Tally, pool: PoolFigures) -> Iterator[Metric]:
    labels = [{"group": str(at), "kind": group.kind} for at, group in enumerate(tally.hello.cache.groups)]
    for index, name, text in ((0, "used", "held by requests"), (1, "cached", "cached and held by no request")):
        samples = [(each, float(counts[index])) for each, counts in zip(labels, pool.groups, strict=True)]
        yield make.gauge(f"kvscope_num_{name}_blocks_of_group", f"Blocks of a KV group {text}.", *samples)


def _fragmentation(make: Maker, pool: PoolFigures) -> Iterator[Metric]:
    slots = pool.slots
    text = "Slots of the pool by use: used, reserved for future tokens, wasted, cached, free."
    uses = ("used", "reserved", "wasted", "cached", "free")
    yield make.gauge("kvscope_num_slots", text, *[({"use": use}, getattr(slots, f"num_{use}")) for use in uses])
    for name, text, ratio in (
        ("internal", "Wasted share of held slots.", slots.internal_fragmentation),
        ("external", "Share of the free blocks outside the longest free run.", slots.external_fragmentation),
    ):
        if ratio is not None:
            yield make.gauge(f"kvscope_{name}_fragmentation_ratio", text, ({}, ratio))


def _memory(memory: MemoryBreakdown) -> list[tuple[Labels, float]]:
    kinds = ("weights", "kv", "kv_resident", "workspace", "step", "graphs", "staging")
    values = ((kind, getattr(memory, f"{kind}_bytes")) for kind in kinds)
    return [({"kind": kind}, value) for kind, value in values if value >= 0]


def _device(make: Maker, sample: DeviceSample) -> Iterator[Metric]:
    parts = {"total": sample.memory_total_bytes, "used": sample.memory_used_bytes, "process": sample.process_bytes}
    known: list[tuple[Labels, float]] = [({"part": part}, value) for part, value in parts.items() if value >= 0]
    if known:
        text = "Device memory: total, used by all processes, used by the engine."
        yield make.gauge("kvscope_device_memory_bytes", text, *known)
    for name, text, value in (
        ("utilization_ratio", "GPU busy, or the engine's share of all CPUs, 0 to 1.", sample.utilization),
        ("power_watts", "Device power draw.", sample.power_watts),
        ("temperature_celsius", "Device temperature.", sample.temperature_celsius),
    ):
        if value >= 0:
            yield make.gauge(f"kvscope_device_{name}", text, ({}, value))
