"""What a policy's card says, as text; and the colours of its map."""

from __future__ import annotations

from typing import Final

from kvscope_app.look.number_text import count, num_bytes, percent, plural
from kvscope_app.look.theme import Theme, mix
from kvscope_telemetry.messages.what_if import MapKind, PolicyUse, WhatIfAnswer

HEADING: Final = "The running requests, placed by other allocators into the same memory."
HEADING_TIP: Final = (
    "Requests arrive, grow and end as in the engine. Without prefix sharing or caching: only placement is compared."
)
_NAMES: Final = {"contiguous": "Contiguous", "buddy": "Buddy", "virtual": "Virtual", "paged": "Paged"}
_MEANINGS: Final = {
    "contiguous": "Reserves the maximum length for each request, in one piece.",
    "buddy": "One piece: the prompt, plus a power of two for output that doubles when exceeded.",
    "virtual": "An address range per request; physical pages are mapped in each layer as tokens arrive.",
    "paged": "Any free block, as tokens arrive.",
}
_MAP_WORDS: Final = {
    MapKind.USED: "used",
    MapKind.RESERVED: "reserved",
    MapKind.INTERNAL: "wasted",
    MapKind.ROUNDING: "rounded up",
    MapKind.FREE: "free",
}


def map_colors(theme: Theme) -> dict[MapKind, str]:
    """As in the page map where it has the same: in use, free; held and empty is the red of its fill colours."""
    return {
        MapKind.USED: theme.block_active,
        MapKind.RESERVED: mix(theme.block_active, theme.block_free, 0.55),
        MapKind.INTERNAL: mix(theme.bad, theme.base, 0.15),
        MapKind.ROUNDING: theme.series[1],
        MapKind.FREE: theme.block_free,
    }


def page_note(page_bytes: int) -> str:
    """What `virtual` maps at a time."""
    return f"virtual: pages of {_page_size(page_bytes)}"


def legend(theme: Theme) -> list[tuple[str, str]]:
    """(colour, word) of each kind."""
    colors = map_colors(theme)
    return [(colors[kind], word) for kind, word in _MAP_WORDS.items()]


def name(use: PolicyUse) -> str:
    """The policy, with its size of block where that is what differs."""
    known = _NAMES.get(use.allocator, use.allocator)
    return f"{known}, {use.block_size} per block" if use.allocator == "paged" else known


def waste(use: PolicyUse, answer: WhatIfAnswer) -> str:
    """How much is held and empty: bytes, or slots where a slot's bytes are not known."""
    if use.refused:
        return "Does not fit"
    return _amount(use.num_wasted, answer)


def waste_share(use: PolicyUse) -> str:
    """The same as a share of what is held."""
    if use.refused:
        return ""
    return f"wasted, {percent(use.wasted_share)}" if use.num_held else "wasted"


def placed(use: PolicyUse) -> str:
    """How many run, and how many could not."""
    if use.refused:
        return "not enough memory"
    if not use.num_waiting:
        return f"all {count(use.num_placed)} running" if use.num_placed > 1 else f"{count(use.num_placed)} running"
    return f"{count(use.num_placed)} running, {count(use.num_waiting)} waiting"


def difference(use: PolicyUse, answer: WhatIfAnswer) -> str:
    """Against the policy in use; empty where there is nothing to compare."""
    if use.is_current:
        return "in use now"
    current = next((other for other in answer.policies if other.is_current and not other.refused), None)
    if use.refused or current is None:
        return ""
    more = use.num_wasted - current.num_wasted
    if not more:
        return "the same"
    return f"{_amount(abs(more), answer)} {'more' if more > 0 else 'less'}"


def tip(use: PolicyUse, answer: WhatIfAnswer) -> str:
    """All there is to tell."""
    meaning = _MEANINGS.get(use.allocator, "")
    if use.refused:
        return f"{meaning}\n{use.refused}"
    rows = [
        ("Used", use.num_used),
        ("Reserved, may be used", use.num_reserved),
        ("Wasted", use.num_internal),
        ("Wasted by rounding up", use.num_rounding),
        ("Free", use.num_external),
        ("Less than a block", use.num_outside),
    ]
    lines = [f"{what}: {_both(slots, answer)}" for what, slots in rows if slots]
    if use.allocator == "virtual":
        pages = f"pages of {_page_size(answer.page_bytes)} in each layer"
        lines.insert(0, f"Mapped for {plural(use.block_size, 'token')} at a time, in {pages}")
    if use.num_held:
        lines.append(f"Wasted of what is held: {percent(use.wasted_share)}")
    if use.num_external:
        scattered = percent(use.external_fragmentation)
        lines.append(f"Free memory that is not in its largest piece: {scattered}")
    return "\n".join([meaning, *lines])


def _page_size(page_bytes: int) -> str:
    """Whole KiB or MiB."""
    return f"{page_bytes >> 20} MiB" if page_bytes >= 1 << 20 else f"{page_bytes >> 10} KiB"


def _amount(slots: int, answer: WhatIfAnswer) -> str:
    return num_bytes(slots * answer.slot_bytes) if answer.slot_bytes else plural(slots, "slot")


def _both(slots: int, answer: WhatIfAnswer) -> str:
    size = f", {num_bytes(slots * answer.slot_bytes)}" if answer.slot_bytes else ""
    return f"{plural(slots, 'slot')}{size}"
