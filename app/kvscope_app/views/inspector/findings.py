"""Search for blocks, requests and steps in the mirror and the overview. Imports no Qt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import count, plural
from kvscope_app.views.page_map.block_facts import block_facts
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.summaries.session_overview import SessionOverview

MAX_IDS: Final = 8
MAX_EPOCHS: Final = 4
_TIERS: Final = {word: tier for tier, style in TIER_STYLES.items() for word in style.search_words}
_NUMBER: Final = re.compile(rf"({'|'.join(('#', 'request', 'step', *_TIERS))})?\s*(\d{{1,18}})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    """Search result. `time_ns` is the time to show with it, or None to stay at the time shown."""

    text: str
    detail: str
    block: int | None = None
    request: int | None = None
    epoch: int = 0
    time_ns: int | None = None
    is_text: bool = False


def findings(query: str, mirror: Mirror, overview: SessionOverview) -> list[Finding]:
    """Return the results for `query`, most likely first."""
    query = query.strip()
    if not query or mirror.hello is None:
        return []
    found: list[Finding] = []
    number = _NUMBER.fullmatch(re.sub(r"(?<=\d)[\s,\u202f](?=\d)", "", query))
    if number is not None:
        kind, value = (number[1] or "").lower(), int(number[2])
        if kind in ("", *_TIERS):
            found += _blocks(mirror, value, _TIERS.get(kind))
        if kind in ("", "#", "request"):
            found += _request(mirror, overview, value)
        if kind in ("", "step"):
            found += _step(mirror, overview, value)
    if number is None or not number[1]:
        request_numbers = {finding.request for finding in found}
        found += [finding for finding in _by_id(mirror, query.casefold()) if finding.request not in request_numbers]
    return found


def _blocks(mirror: Mirror, number: int, tier: Tier | None) -> Iterator[Finding]:
    assert mirror.hello is not None, "there are blocks only once there is an engine"
    cache = mirror.hello.cache
    for row_tier, rows in cache.rows_by_tier.present.items():
        row = rows.start + number
        if tier in (None, row_tier) and row in rows and row < mirror.num_rows:
            facts = block_facts(mirror, row, cache.block_size)
            owner_text = f", request #{count(facts.owner)}" if facts.owner is not None else ""
            yield Finding(facts.title, facts.state + owner_text, block=row)


def _request(mirror: Mirror, overview: SessionOverview, number: int) -> Iterator[Finding]:
    row = mirror.requests.row_of(number)
    if row is not None:
        yield _shown_request(mirror, row)
    epochs = np.unique(overview.epoch).tolist()
    for epoch in epochs[-MAX_EPOCHS:]:
        if row is not None and epoch == mirror.epoch:
            continue
        indices = overview.events.find(request=(epoch, number))
        events = [overview.events[index] for index in indices.tolist() if overview.events[index].event.number == number]
        if events:
            run_text = "" if epoch == mirror.epoch else ", in another engine run"
            detail = f"{events[0].event.kind} at {clock_text(events[0].time_ns)}{run_text}"
            yield Finding(f"Request #{count(number)}", detail, request=number, epoch=epoch, time_ns=events[0].time_ns)


def _shown_request(mirror: Mirror, row: int) -> Finding:
    requests = mirror.requests
    number, state = int(requests.number[row]), RequestState(int(requests.state[row])).name.lower()
    blocks = plural(int(requests.num_held[row]), "block")
    details = (f"{state}, {blocks}", requests.request_ids[row], requests.adapters[row])
    return Finding(f"Request #{count(number)}", "  ·  ".join(filter(None, details)), request=number)


def _by_id(mirror: Mirror, query: str) -> Iterator[Finding]:
    """Yield the newest requests whose id or LoRA adapter contains `query`, at most `MAX_IDS`."""
    ids, adapters = mirror.requests.request_ids, mirror.requests.adapters
    matching = (
        row for row in range(len(ids) - 1, -1, -1) if query in ids[row].casefold() or query in adapters[row].casefold()
    )
    return (_shown_request(mirror, row) for row in islice(matching, MAX_IDS))


def _step(mirror: Mirror, overview: SessionOverview, step: int) -> Iterator[Finding]:
    """Yield the recorded second that contains `step`, unless it is the step shown."""
    if mirror.step == step:
        return
    indices = np.flatnonzero(overview.epoch == (mirror.epoch or 0))
    index = int(np.searchsorted(overview.column("step")[indices], step)) if indices.size else indices.size
    if index < indices.size and step > 0:
        time_ns = int(overview.time_ns[indices[index]])
        yield Finding(f"Step {count(step)}", f"in the second of {clock_text(time_ns)[:8]}", time_ns=time_ns)
