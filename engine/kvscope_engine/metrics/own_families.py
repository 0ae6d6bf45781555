"""What vLLM has no name for: blocks by state and tier, bytes, fragmentation, causes, and how well we listen."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from prometheus_client.core import Metric

from kvscope_engine.metrics.families import Labels, Maker
from kvscope_engine.metrics.pool_figures import PoolFigures
from kvscope_engine.metrics.tally import Tally
from kvscope_telemetry.messages.telemetry import DeviceSample, MemoryBreakdown
from kvscope_telemetry.source import SourceState, SourceStatus

TIER_GAUGES: Final = {
    "num_blocks": "Blocks that there is memory for.",
    "num_used": "Blocks that requests hold; in a lower tier, those of swapped requests.",
    "num_shared": "Blocks that several requests hold, among the used.",
    "num_cached": "Blocks that nobody holds and a later prompt may find.",
    "num_free": "Blocks that hold nothing.",
}
"""Each is an attribute of `TierFigures`."""
TOTALS: Final = {
    "evicted_blocks": "Blocks that lost their cached prefix.",
    "copied_blocks": "Blocks copied on write.",
    "swapped_blocks": "Blocks of preempted requests that were moved to a lower tier.",
    "sunk_blocks": "Cached blocks that went to a lower tier instead of being forgotten.",
    "loaded_blocks": "Blocks that came back from a lower tier.",
    "lost_blocks": "Blocks of a lower tier that could not be read back whole.",
    "restored_tokens": "Tokens that requests had again after a preemption without computing them.",
    "recomputed_tokens": "Tokens that a preemption had lost, computed again.",
    "admitted": "Requests that got their first place in a step.",
    "refused": "Requests that were not taken.",
    "messages_dropped": "Messages that the engine threw away because its publisher was behind.",
}
"""Each is a field of `Counters`."""
TOTAL_NAMES: Final = {
    "swapped_blocks": "swapped_out_blocks",
    "loaded_blocks": "swapped_in_blocks",
    "admitted": "requests_admitted",
    "refused": "requests_refused",
}
"""Where the page has another name."""


def counters(make: Maker, tally: Tally) -> Iterator[Metric]:
    """What was counted, also while the engine is away."""
    yield make.counter("kvscope_steps", "Steps of the engine.", ({}, tally.num_steps))
    for field, text in TOTALS.items():
        name = TOTAL_NAMES.get(field, field)
        yield make.counter(f"kvscope_{name}", text, ({}, getattr(tally.counters, field)))
    causes = [({"cause": cause}, float(count)) for cause, count in tally.preemptions.counts.items()]
    text = "Preemptions by what became of the blocks; unknown: while nobody listened here."
    yield make.counter("kvscope_preemptions", text, *causes)


def gauges(make: Maker, tally: Tally, pool: PoolFigures) -> Iterator[Metric]:
    """How it is now."""
    for field, text in TIER_GAUGES.items():
        name = field if field == "num_blocks" else f"{field}_blocks"
        yield make.gauge(f"kvscope_{name}", text, *_by_tier(pool, field))
    yield make.gauge("kvscope_num_pinned_blocks", "Blocks that are not evicted: somebody asked.", ({}, pool.num_pinned))
    block_bytes = tally.hello.cache.block_bytes
    if block_bytes:
        yield make.gauge("kvscope_block_bytes", "Bytes of one block over all layers.", ({}, block_bytes))
    yield from _fragmentation(make, pool)
    if tally.memory is not None:
        yield make.gauge("kvscope_memory_bytes", "The engine's memory by kind.", *_memory(tally.memory))
    if tally.sample is not None:
        yield from _device(make, tally.sample)


def listening(make: Maker, status: SourceStatus, *, is_up: bool) -> Iterator[Metric]:
    """How the engine is reached, always there. `make` counts since this process began."""
    yield make.gauge("kvscope_up", "1 while the engine tells of itself, 0 while it is away or loads.", ({}, is_up))
    states = [({"state": str(state)}, float(state is status.state)) for state in _STATES]
    yield make.gauge("kvscope_engine_state", "1 for the state that the engine is in.", *states)
    for name, text, value in (
        ("reader_frames_lost", "Frames of the engine that never came here.", status.frames_dropped),
        ("reader_resyncs", "Times that the whole state was asked for again.", status.resyncs),
        ("reader_messages_rejected", "Messages that could not be read.", status.messages_rejected),
    ):
        yield make.counter(f"kvscope_{name}", text, ({}, value))


_STATES: Final = tuple(state for state in SourceState if state is not SourceState.PLAYBACK)


def _by_tier(pool: PoolFigures, field: str) -> list[tuple[Labels, float]]:
    get = attrgetter(field)
    return [({"tier": tier.tier}, float(get(tier))) for tier in pool.tiers]


def _fragmentation(make: Maker, pool: PoolFigures) -> Iterator[Metric]:
    slots = pool.slots
    text = "Slots of the pool by use: used, reserved for tokens to come, wasted (held for nothing), cached, free."
    uses = ("used", "reserved", "wasted", "cached", "free")
    yield make.gauge("kvscope_num_slots", text, *[({"use": use}, getattr(slots, f"num_{use}")) for use in uses])
    for name, text, ratio in (
        ("internal", "Wasted slots among those held.", slots.internal_fragmentation),
        ("external", "Share of the free blocks outside the longest free run.", slots.external_fragmentation),
    ):
        if ratio is not None:
            yield make.gauge(f"kvscope_{name}_fragmentation_ratio", text, ({}, ratio))


def _memory(memory: MemoryBreakdown) -> list[tuple[Labels, float]]:
    kinds = ("weights", "kv", "kv_resident", "workspace", "step", "graphs", "staging")
    values = ((kind, getattr(memory, f"{kind}_bytes")) for kind in kinds)
    return [({"kind": kind}, value) for kind, value in values if value >= 0]


def _device(make: Maker, sample: DeviceSample) -> Iterator[Metric]:
    """Only what is known: unknown is -1, and has no sample."""
    parts = {"total": sample.memory_total_bytes, "used": sample.memory_used_bytes, "process": sample.process_bytes}
    known: list[tuple[Labels, float]] = [({"part": part}, value) for part, value in parts.items() if value >= 0]
    if known:
        text = "The device's memory: all of it, used by everybody, used by the engine."
        yield make.gauge("kvscope_device_memory_bytes", text, *known)
    for name, text, value in (
        ("utilization_ratio", "How busy the device is, 0 to 1.", sample.utilization),
        ("power_watts", "What it draws.", sample.power_watts),
        ("temperature_celsius", "How hot it is.", sample.temperature_celsius),
    ):
        if value >= 0:
            yield make.gauge(f"kvscope_device_{name}", text, ({}, value))
