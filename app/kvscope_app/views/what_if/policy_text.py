"""Texts of the cards of allocators, and the colours of their maps."""

from __future__ import annotations

from typing import Final

from kvscope_app.ui.number_text import count, num_bytes, percent, plural
from kvscope_app.ui.theme import Theme, mix
from kvscope_telemetry.messages.what_if import EXPANDED, NOT_FREED, MapKind, NotAsked, PolicyUse, WhatIfAnswer

HEADING: Final = "The running requests in the same memory, without prefix sharing, placed or stored differently."
HEADING_TIP: Final = (
    "Requests arrive, grow and end as in the engine. Without prefix sharing or caching: only placement is compared. "
    "So waste here is not the engine's own, which Memory and Fragmentation show."
)
_NAMES: Final = {"contiguous": "Contiguous", "buddy": "Buddy", "virtual": "Virtual", "paged": "Paged"}
_MEANINGS: Final = {
    "contiguous": "Reserves the maximum length for each request, in one piece.",
    "buddy": "One piece: the prompt, plus a power of two for output that doubles when exceeded.",
    "virtual": "An address range per request; physical pages are mapped in each layer as tokens arrive.",
    "paged": "Any free block, as tokens arrive.",
}
_QUESTION_MEANINGS: Final = {
    NOT_FREED: "As now, but windows and chunks free nothing: all layers hold all tokens.",
    EXPANDED: "As now, but with keys and values of each head in place of one latent per token.",
}
_MAP_LABELS: Final = {
    MapKind.USED: "used",
    MapKind.UNREAD: "no longer read",
    MapKind.RESERVED: "reserved",
    MapKind.INTERNAL: "wasted",
    MapKind.ROUNDING: "rounded up",
    MapKind.FREE: "free",
}


def map_colors(theme: Theme) -> dict[MapKind, str]:
    """Return the colours of the map: those of the page map for equal states; wasted slots have the red of its fill
    mode."""
    return {
        MapKind.USED: theme.block_active,
        MapKind.RESERVED: mix(theme.block_active, theme.block_free, 0.55),
        MapKind.INTERNAL: mix(theme.bad, theme.base, 0.15),
        MapKind.ROUNDING: theme.series[1],
        MapKind.FREE: theme.block_free,
        MapKind.UNREAD: theme.series[3],
    }


def page_note(page_bytes: int) -> str:
    return f"virtual: pages of {_page_size(page_bytes)}"


def legend(theme: Theme, *, has_unread: bool = False) -> list[tuple[str, str]]:
    """Return (colour, label) of each kind. `has_unread`: include slots that windows and chunks no longer read."""
    colors = map_colors(theme)
    return [(colors[kind], word) for kind, word in _MAP_LABELS.items() if kind is not MapKind.UNREAD or has_unread]


def name(use: PolicyUse) -> str:
    """Return the allocator's name, with its block size for paged ones, or the question."""
    if use.question:
        return _capital(use.question)
    known = _NAMES.get(use.allocator, use.allocator)
    return f"{known}, {use.block_size} per block" if use.allocator == "paged" else known


def waste(use: PolicyUse) -> str:
    """Return the wasted amount: bytes, or slots if the bytes per slot are unknown."""
    if use.refused:
        return "Does not fit"
    return _amount(use.num_wasted, use.slot_bytes)


def waste_share(use: PolicyUse) -> str:
    if use.refused:
        return ""
    return f"wasted, {percent(use.wasted_share)}" if use.num_held else "wasted"


def placed(use: PolicyUse) -> str:
    """Return how many requests run and how many wait; if none waits, how many similar ones would fit."""
    if use.refused:
        return "not enough memory"
    if use.num_waiting:
        return f"{count(use.num_placed)} running, {count(use.num_waiting)} waiting"
    if use.num_fitting:
        return f"{count(use.num_placed)} running, {count(use.num_fitting)} fit"
    return f"all {count(use.num_placed)} running" if use.num_placed > 1 else f"{count(use.num_placed)} running"


def difference(use: PolicyUse, answer: WhatIfAnswer) -> str:
    """Return the difference from the current allocator in waste, or in held memory for a question; "" if not
    comparable."""
    if use.is_current:
        return "in use now"
    current = next((other for other in answer.policies if other.is_current and not other.refused), None)
    if use.refused or current is None:
        return ""
    if bool(use.slot_bytes) != bool(current.slot_bytes):
        return ""
    ours, theirs = (one.num_held if use.question else one.num_wasted for one in (use, current))
    more = ours * (use.slot_bytes or 1) - theirs * (current.slot_bytes or 1)
    amount = num_bytes(abs(more)) if use.slot_bytes else plural(round(abs(more)), "slot")
    words = f"{amount} {'more' if more > 0 else 'less'}" if more else "the same"
    return f"holds {words}" if use.question else words


def tip(use: PolicyUse, answer: WhatIfAnswer) -> str:
    meaning = _QUESTION_MEANINGS.get(use.question, _MEANINGS.get(use.allocator, ""))
    if use.refused:
        return f"{meaning}\n{use.refused}"
    rows = [
        ("Used", use.num_used),
        ("No longer read, behind a window or before a chunk", use.num_unread),
        ("Reserved, may be used", use.num_reserved),
        ("Wasted", use.num_internal),
        ("Wasted by rounding up", use.num_rounding),
        ("Free", use.num_external),
        ("Less than a block", use.num_outside),
    ]
    lines = [f"{what}: {_both(slots, use.slot_bytes)}" for what, slots in rows if slots]
    if use.allocator == "virtual":
        pages = f"pages of {_page_size(answer.page_bytes)} in each layer"
        lines.insert(0, f"Mapped for {plural(use.block_size, 'token')} at a time, in {pages}")
    if use.num_held:
        lines.append(f"Wasted of what is held: {percent(use.wasted_share)}")
    if use.num_external:
        scattered = percent(use.external_fragmentation)
        lines.append(f"Free memory that is not in its largest piece: {scattered}")
    if use.num_fitting:
        lines.append(f"Room for {plural(use.num_fitting, 'request')} as long as these on average")
    if use.num_preempted:
        lines.append(f"Requests lost their place: {plural(use.num_preempted, 'time')}")
    return "\n".join([meaning, *lines])


def _page_size(page_bytes: int) -> str:
    """Return text in whole KiB or MiB."""
    return f"{page_bytes >> 20} MiB" if page_bytes >= 1 << 20 else f"{page_bytes >> 10} KiB"


def not_asked(missing: list[NotAsked]) -> str:
    """Return which questions have no card, or ""."""
    names = ", ".join(one.question for one in missing)
    return f"Not known: {names}" if names else ""


def why_not_asked(missing: list[NotAsked]) -> str:
    return "\n".join(f"{_capital(one.question)}: {one.why}" for one in missing)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _amount(slots: int, slot_bytes: float) -> str:
    return num_bytes(slots * slot_bytes) if slot_bytes else plural(slots, "slot")


def _both(slots: int, slot_bytes: float) -> str:
    size = f", {num_bytes(slots * slot_bytes)}" if slot_bytes else ""
    return f"{plural(slots, 'slot')}{size}"
