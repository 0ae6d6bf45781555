"""Texts of the cards of allocators, and the colours of the small memory maps."""

from __future__ import annotations

from typing import Final

from kvscope_app.ui.number_text import count, num_bytes, percent, plural
from kvscope_app.ui.theme import Theme, mix
from kvscope_telemetry.messages.what_if import (
    EXPANDED,
    NOT_FREED,
    MapKind,
    PolicyUse,
    UnsupportedScenario,
    WhatIfAnswer,
)

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
    """Return the colour of each kind of slot. Used and free slots have the colours of active and free blocks in
    the page map. Slots that are wasted inside an allocation are red.
    """
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
    colors = map_colors(theme)
    return [(colors[kind], text) for kind, text in _MAP_LABELS.items() if kind is not MapKind.UNREAD or has_unread]


def name(use: PolicyUse) -> str:
    """Return the allocator's name, with the block size if it is paged. For a card that shows the current allocator
    under a changed assumption, return the assumption.
    """
    if use.question:
        return _capitalized(use.question)
    name_text = _NAMES.get(use.allocator, use.allocator)
    return f"{name_text}, {use.block_size} per block" if use.allocator == "paged" else name_text


def waste(use: PolicyUse) -> str:
    """Return the wasted amount in bytes, or in slots if the bytes per slot are unknown."""
    if use.refused:
        return "Does not fit"
    return _amount(use.num_wasted, use.slot_bytes)


def waste_share(use: PolicyUse) -> str:
    if use.refused:
        return ""
    return f"wasted, {percent(use.wasted_share)}" if use.num_held else "wasted"


def placed(use: PolicyUse) -> str:
    """Return a text with the number of running requests. The text also has the number of waiting requests or,
    if none waits, how many requests of average length would fit in all.
    """
    if use.refused:
        return "not enough memory"
    if use.num_waiting:
        return f"{count(use.num_placed)} running, {count(use.num_waiting)} waiting"
    if use.num_fitting:
        return f"{count(use.num_placed)} running, {count(use.num_fitting)} fit"
    return f"all {count(use.num_placed)} running" if use.num_placed > 1 else f"{count(use.num_placed)} running"


def difference(use: PolicyUse, answer: WhatIfAnswer) -> str:
    """Return the difference in waste from the current allocator, or in held memory for a card with a changed
    assumption.

    Returns `in use now` for the current allocator, and "" if the two cannot be compared.
    """
    if use.is_current:
        return "in use now"
    current = next((other for other in answer.policies if other.is_current and not other.refused), None)
    if use.refused or current is None:
        return ""
    if bool(use.slot_bytes) != bool(current.slot_bytes):
        return ""
    own_slots, current_slots = (each.num_held if use.question else each.num_wasted for each in (use, current))
    change = own_slots * (use.slot_bytes or 1) - current_slots * (current.slot_bytes or 1)
    amount = num_bytes(abs(change)) if use.slot_bytes else plural(round(abs(change)), "slot")
    text = f"{amount} {'more' if change > 0 else 'less'}" if change else "the same"
    return f"holds {text}" if use.question else text


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
    lines = [f"{text}: {_slots_and_bytes(slots, use.slot_bytes)}" for text, slots in rows if slots]
    if use.allocator == "virtual":
        pages = f"pages of {_page_size(answer.page_bytes)} in each layer"
        lines.insert(0, f"Mapped for {plural(use.block_size, 'token')} at a time, in {pages}")
    if use.num_held:
        lines.append(f"Wasted of what is held: {percent(use.wasted_share)}")
    if use.num_external:
        share = percent(use.external_fragmentation)
        lines.append(f"Free memory that is not in its largest piece: {share}")
    if use.num_fitting:
        lines.append(f"Room for {plural(use.num_fitting, 'request')} as long as these on average")
    if use.num_preempted:
        lines.append(f"{plural(use.num_preempted, 'preemption')} so far")
    return "\n".join([meaning, *lines])


def _page_size(page_bytes: int) -> str:
    return f"{page_bytes >> 20} MiB" if page_bytes >= 1 << 20 else f"{page_bytes >> 10} KiB"


def not_asked(missing: list[UnsupportedScenario]) -> str:
    """Return a text that lists the what-if questions that were not simulated, or "" if all were."""
    names = ", ".join(each.question for each in missing)
    return f"Not known: {names}" if names else ""


def why_not_asked(missing: list[UnsupportedScenario]) -> str:
    return "\n".join(f"{_capitalized(each.question)}: {each.why}" for each in missing)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _amount(slots: int, slot_bytes: float) -> str:
    return num_bytes(slots * slot_bytes) if slot_bytes else plural(slots, "slot")


def _slots_and_bytes(slots: int, slot_bytes: float) -> str:
    size = f", {num_bytes(slots * slot_bytes)}" if slot_bytes else ""
    return f"{plural(slots, 'slot')}{size}"
