"""Details of the KV pool as rows of (name, value, explanation). Imports no Qt."""

from __future__ import annotations

from kvscope_app.ui.number_text import UNKNOWN, count, num_bytes, percent, plural
from kvscope_app.views.memory.memory_breakdown import KVDetail
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.telemetry import Counters
from kvscope_telemetry.mirror.pool_use import RESERVING, VIRTUAL

Row = tuple[str, str, str]


def detail_rows(detail: KVDetail) -> list[Row]:
    return [
        ("Allocation", detail.allocator or UNKNOWN, "How requests get their blocks (--allocator)"),
        *(_slot_rows(detail) if detail.capabilities.filled else []),
        *(_fragmentation_rows(detail) if detail.capabilities.filled and detail.capabilities.physical_rows else []),
        *_other_rows(detail),
    ]


def counter_rows(counters: Counters, capabilities: Capabilities = OWN_ENGINE) -> list[Row]:
    """Return rows about block events since the engine started, or no rows if the engine does not count them."""
    if not (counters.admitted or counters.evicted_blocks or counters.copied_blocks):
        return []
    copied = "Copied on write", plural(counters.copied_blocks, "block"), "Copies of shared blocks made before a write"
    return [
        ("Evicted", plural(counters.evicted_blocks, "block"), "Cached blocks reused for other tokens, in total"),
        *([copied] if capabilities.ref_counts else []),
        ("Preempted", f"{count(counters.preemptions)} ×", "Requests that lost their blocks to another request"),
    ]


def _slot_rows(detail: KVDetail) -> list[Row]:
    use = detail.use
    return [
        (
            "Slots held",
            count(use.num_held),
            "Slots of the blocks that requests hold: those used, reserved and wasted",
        ),
        ("  used", _share(use.num_used, use.num_held), "Slots with a token; shared ones count once"),
        (
            "  reserved",
            _share(use.num_reserved, use.num_held),
            "Empty, reserved for future tokens of their request; unavailable to others. Only allocators "
            "that reserve ahead have any (contiguous, buddy)",
        ),
        ("  wasted", _share(use.num_wasted, use.num_held), _wasted_meaning(detail.allocator)),
    ]


def _wasted_meaning(allocator: str) -> str:
    if allocator == VIRTUAL:
        return "Held but empty: the unused ends of requests' last pages"
    if allocator in RESERVING:
        return "Held but empty, beyond the request's maximum length"
    return "Held but empty: the unused ends of requests' last blocks"


def _fragmentation_rows(detail: KVDetail) -> list[Row]:
    use, external = detail.use, detail.use.external_fragmentation
    return [
        (
            "Internal fragmentation",
            "nothing in use" if use.internal_fragmentation is None else percent(use.internal_fragmentation),
            "Wasted share of held slots",
        ),
        (
            "External fragmentation",
            "no free blocks" if external is None else percent(external),
            "Share of free slots outside the longest run of free blocks. Harmless with paged, which can use any free "
            "block. With contiguous and buddy, which need a run per request, a request may find no run although "
            "enough blocks are free",
        ),
        (
            "Largest free run",
            f"{count(use.largest_free_run)} of {count(use.num_free)}",
            (
                "Free slots in the longest run of free blocks, and all free slots. With the virtual allocator, any "
                "page can be mapped anywhere"
            ),
        ),
    ]


def _other_rows(detail: KVDetail) -> list[Row]:
    use, capabilities = detail.use, detail.capabilities
    saved = f"{num_bytes(detail.saved_bytes)} ({plural(detail.num_saved_blocks, 'block')})"
    resident = [
        (
            "Memory behind blocks",
            num_bytes(detail.resident_bytes),
            "Measured: physical memory behind block addresses now. Pages of ended requests stay mapped until needed",
        )
    ]
    return [
        *(resident if detail.allocator == VIRTUAL else []),
        ("Cached tokens", f"{count(use.num_cached)} tokens", "Kept for prompts with the same prefix"),
        (
            "Available",
            f"{count(use.num_free + use.num_cached)} tokens" if capabilities.free_rows else UNKNOWN,
            "Slots of free and cached blocks: what fits before requests wait or are preempted",
        ),
        (
            "Saved by sharing",
            saved if capabilities.ref_counts else UNKNOWN,
            "Extra memory needed if requests did not share prefix blocks",
        ),
        (
            "KV per token",
            UNKNOWN if detail.token_bytes is None else num_bytes(detail.token_bytes),
            "Keys and values in all layers, with scales if quantized",
        ),
        ("Block", f"{detail.block_size} slots, {num_bytes(detail.block_bytes or None)}", "The unit of allocation"),
        ("KV type", detail.dtype or UNKNOWN, "Data type of the blocks (--kv-cache-dtype)"),
    ]


def _share(part: int, whole: int) -> str:
    return f"{count(part)} ({percent(part / whole)})" if whole else count(part)
