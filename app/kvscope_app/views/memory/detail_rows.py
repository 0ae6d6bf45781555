"""The KV pool in detail, as lines of name, value and meaning. No Qt."""

from __future__ import annotations

from kvscope_app.look.number_text import UNKNOWN, count, num_bytes, percent, plural
from kvscope_app.views.memory.account import KVDetail
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.telemetry import Counters
from kvscope_telemetry.state.pool_use import RESERVING, VIRTUAL

Row = tuple[str, str, str]


def detail_rows(detail: KVDetail) -> list[Row]:
    """Name, value and meaning of each line about the pool."""
    return [
        ("Allocation", detail.allocator or UNKNOWN, "How requests get their blocks (--allocator)"),
        *(_slots(detail) if detail.told.filled else []),
        *(_fragmentation(detail) if detail.told.filled and detail.told.physical_rows else []),
        *_others(detail),
    ]


def counter_rows(counters: Counters, told: Capabilities = OWN_ENGINE) -> list[Row]:
    """What happened to blocks since the engine began; nothing where it does not count."""
    if not (counters.admitted or counters.evicted_blocks or counters.copied_blocks):
        return []
    copied = "Copied on write", plural(counters.copied_blocks, "block"), "Shared blocks that one request had to change"
    return [
        ("Evicted", plural(counters.evicted_blocks, "block"), "Cached blocks that were taken for other tokens, in all"),
        *([copied] if told.ref_counts else []),
        ("Preempted", f"{count(counters.preemptions)} ×", "Requests whose blocks were taken for another's"),
    ]


def _slots(detail: KVDetail) -> list[Row]:
    use = detail.use
    return [
        (
            "Slots held",
            count(use.num_held),
            "Slots of the blocks that requests hold: those used, reserved and wasted",
        ),
        ("  used", _share(use.num_used, use.num_held), "They hold a token; one that is shared counts once"),
        (
            "  reserved",
            _share(use.num_reserved, use.num_held),
            "Empty, and set aside for tokens of their request that may come: nobody else can have them meanwhile."
            " Only allocators that reserve ahead have any (contiguous, buddy)",
        ),
        ("  wasted", _share(use.num_wasted, use.num_held), _wasted_meaning(detail.allocator)),
    ]


def _wasted_meaning(allocator: str) -> str:
    if allocator == VIRTUAL:
        return "Empty, and held: what is left of the last pages of requests"
    if allocator in RESERVING:
        return "Empty, and held beyond the most tokens that their request may have"
    return "Empty, and held: the ends of requests that do not fill their last block"


def _fragmentation(detail: KVDetail) -> list[Row]:
    use, scattered = detail.use, detail.use.external_fragmentation
    return [
        (
            "Internal fragmentation",
            "nothing in use" if use.internal_fragmentation is None else percent(use.internal_fragmentation),
            "Wasted slots of those held",
        ),
        (
            "External fragmentation",
            "nothing is free" if scattered is None else percent(scattered),
            "1 − largest free run / free: how much of what is free is not in one piece. It costs nothing where any"
            " block will do (paged), and refuses requests where runs are needed (contiguous, buddy)",
        ),
        (
            "Largest free run",
            f"{count(use.largest_free_run)} of {count(use.num_free)}",
            "Slots of the most free blocks in a row, of all free slots; under virtual any page can be mapped anywhere",
        ),
    ]


def _others(detail: KVDetail) -> list[Row]:
    use, told = detail.use, detail.told
    saved = f"{num_bytes(detail.saved_bytes)} ({plural(detail.num_saved_blocks, 'block')})"
    resident = [
        (
            "Memory behind blocks",
            num_bytes(detail.resident_bytes),
            "Measured: what the system has behind the addresses of blocks now. Pages of requests that ended stay"
            " until another needs them",
        )
    ]
    return [
        *(resident if detail.allocator == VIRTUAL else []),
        ("Cached tokens", f"{count(use.num_cached)} tokens", "Kept for prompts that begin the same"),
        (
            "Room left",
            f"{count(use.num_free + use.num_cached)} tokens" if told.free_rows else UNKNOWN,
            "Slots of free and cached blocks: what fits before a request waits or is preempted",
        ),
        (
            "Saved by sharing",
            saved if told.ref_counts else UNKNOWN,
            "What would be needed more if requests with the same beginning did not share its blocks",
        ),
        (
            "KV of one token",
            UNKNOWN if detail.token_bytes is None else num_bytes(detail.token_bytes),
            "Keys and values over all layers, with their scales where they are quantized",
        ),
        ("Block", f"{detail.block_size} slots, {num_bytes(detail.block_bytes or None)}", "The unit of allocation"),
        ("KV type", detail.dtype or UNKNOWN, "The type of the numbers in blocks (--kv-cache-dtype)"),
    ]


def _share(part: int, whole: int) -> str:
    """`1 749 (98.5 %)`."""
    return f"{count(part)} ({percent(part / whole)})" if whole else count(part)
