"""Inspector page of a request: its values from the table of requests, its blocks, prefix and events. Imports no Qt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from kvscope_app.session.event_log import LoggedEvent
from kvscope_app.session.history import History
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import count, num_bytes, percent, plural
from kvscope_app.views.block_locations import group_name, locate_block
from kvscope_app.views.events.event_entries import why_text
from kvscope_app.views.inspector.event_facts import THIS_EVENT
from kvscope_app.views.inspector.facts import Fact, FactsPage, block_link, event_link, page, time_link
from kvscope_app.views.requests.blocks_text import blocks_sentence
from kvscope_app.views.requests.phase_text import FindFirst, phases
from kvscope_app.views.requests.request_model import COLUMNS
from kvscope_app.views.requests.request_rows import read_columns
from kvscope_app.views.requests.reuse_text import prompt_of, reuse_text
from kvscope_telemetry.ledger import attention_shares
from kvscope_telemetry.messages.telemetry import CacheInfo, Hello
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.request_log import RequestColumns

_MAX_EVENTS: Final = 50
_SHOWN_ELSEWHERE: Final = ("Adapter", "Arrived", "Client", "Reason for the delay")
"""Titles of table columns that the page leaves out, because it shows them in another form."""
_COLD_SHARE: Final = 0.1


def request_page(
    mirror: Mirror,
    history: History,
    number: int,
    texts: Iterable[Fact] = (),
    find_first: FindFirst = lambda: -1,
    event: Iterable[Fact] = (),
    columns: RequestColumns | None = None,
) -> FactsPage | None:
    """Return the page of request `number`, or None if the state shown does not contain it.

    Args:
        texts: Known text of the request's prompt and output.
        find_first: Function that returns the engine time of the request's first token in ns, or -1 if it is not known.
        event: Facts of the event that is shown.
        columns: The request's values as shown in the table of requests; None to compute them for the time shown.
    """
    row = mirror.requests.row_of(number)
    if row is None or mirror.hello is None:
        return None
    events = history.events.of_request(mirror.hello.epoch, number)
    return page(
        f"Request #{count(number)}",
        (THIS_EVENT, event),
        ("Request", _columns(mirror, history, row, columns)),
        ("Phases", _phases(mirror, history, events, number, find_first)),
        ("Times", _times(mirror, history, mirror.hello, row)),
        ("Blocks", _blocks(mirror, mirror.hello, number)),
        ("Prefix", _reuse(mirror, number, events)),
        ("Text", texts),
        ("Events, newest first", _events(history, events)),
    )


def wall_offset_ns(hello: Hello) -> int:
    """Return the wall clock minus the engine's monotonic clock, in ns."""
    return hello.wall_time_ns - hello.time_ns


def _columns(mirror: Mirror, history: History, row: int, shown: RequestColumns | None) -> Iterator[Fact]:
    columns = read_columns(mirror, history.request_times, slice(row, row + 1)) if shown is None else shown
    for column in (each for each in COLUMNS[1:] if each.title not in _SHOWN_ELSEWHERE):
        yield Fact(column.title, column.text(columns, 0), tip=column.tip)
    requests = mirror.requests
    yield Fact("Computed", f"{count(int(requests.num_computed_tokens[row]))} tokens", tip="Tokens with KV in blocks")
    if num_drafts := int(columns.num_draft_tokens[0]):
        num_accepted = int(columns.num_accepted_tokens[0])
        value = f"{count(num_accepted)} of {count(num_drafts)} drafts accepted, {percent(num_accepted / num_drafts)}"
        yield Fact("Speculation", value, tip="Draft tokens checked in one step")
    if priority := int(requests.priority[row]):
        yield Fact("Priority", str(priority))
    if adapter := requests.adapters[row]:
        yield Fact("LoRA", adapter, tip="The adapter that the request uses")
    if index := int(requests.index[row]):
        yield Fact("Completion", f"{index + 1} of this prompt")


def _phases(
    mirror: Mirror, history: History, events: list[LoggedEvent], number: int, find_first: FindFirst
) -> Iterator[Fact]:
    for name, value in phases(mirror, history.request_times, [entry.event for entry in events], number, find_first):
        yield Fact(name, value)


def _times(mirror: Mirror, history: History, hello: Hello, row: int) -> Iterator[Fact]:
    requests, times, number = mirror.requests, history.request_times, mirror.requests.number[row : row + 1]
    moments = (
        ("Arrived", int(requests.arrival_ns[row])),
        ("First ran", int(times.started_ns(number)[0])),
        ("First token", int(times.first_token_ns(number)[0])),
        ("Latest token", int(times.last_token_ns(number)[0])),
        ("Ended", int(requests.finished_ns[row])),
    )
    for name, time_ns in moments:
        if time_ns >= 0:
            wall_ns = time_ns + wall_offset_ns(hello)
            yield Fact(name, clock_text(wall_ns), time_link(wall_ns))


def _blocks(mirror: Mirror, hello: Hello, number: int) -> Iterator[Fact]:
    yield Fact("Holds", blocks_sentence(mirror, number))
    table = mirror.requests.blocks(number, 0)
    for name, index in (("First block", 0), ("Last block", -1)):
        if len(table) > abs(index):
            block = int(table[index])
            yield Fact(name, locate_block(hello.cache, block).name, block_link(block))
    yield from _groups(mirror, hello.cache, number)
    if (cold := _cold_blocks(mirror, number)) is not None:
        yield Fact(
            "Cold blocks", cold.text, tip="From the last attention measurement, averaged over all layers and heads"
        )
        coldest_text = f"{locate_block(hello.cache, cold.coldest).name}, {percent(cold.coldest_share, 2)}"
        yield Fact("Coldest block", coldest_text, block_link(cold.coldest))


def _groups(mirror: Mirror, cache: CacheInfo, number: int) -> Iterator[Fact]:
    """Yield the number of blocks that request `number` holds in each KV group, if there are several groups.

    The text of a group also has the number of blocks found in the prefix cache. That covers only the part of the prefix
    that all groups had in the cache.
    """
    row = mirror.requests.row_of(number)
    if row is None or len(cache.groups) < 2:
        return
    num_cached = int(mirror.requests.num_cached_tokens[row])
    for group, size in enumerate(cache.block_sizes):
        table = mirror.requests.table(number, group)
        if table.size and table[0] >= cache.first_state and cache.num_states:
            yield Fact(f"KV group {group}", _state_text(mirror, cache, group, int(table[0]), num_cached))
            continue
        is_held = table >= cache.num_reserved_blocks
        text = plural(int(is_held.sum()), "block")
        if num_released := int(np.count_nonzero(~is_held)):
            text += f", {count(num_released)} released"
        if num_found := int(is_held[: num_cached // size].sum()):
            text += f"; {count(num_found)} found in the cache"
        yield Fact(f"KV group {group}", f"{group_name(cache.groups[group])}: {text}")


def _state_text(mirror: Mirror, cache: CacheInfo, group: int, row: int, num_cached: int) -> str:
    size = f" of {num_bytes(cache.state_bytes)}" if cache.state_bytes else ""
    text = f"{group_name(cache.groups[group])}: {locate_block(cache, row).name.lower()}{size}"
    return text + (f"; it went on from that after {plural(num_cached, 'token')}" if num_cached else "")


def _reuse(mirror: Mirror, number: int, events: list[LoggedEvent]) -> Iterator[Fact]:
    prompt = prompt_of(mirror, number)
    text = "" if prompt is None else reuse_text([entry.event for entry in events], number, prompt)
    if text:
        yield Fact("Reused", text)


def _events(history: History, events: list[LoggedEvent]) -> Iterator[Fact]:
    for entry in reversed(events[-_MAX_EVENTS:]):
        wall_ns = history.wall_ns(entry.time_ns)
        reason = why_text(entry.event)
        value = f"{entry.event.kind}: {reason}" if reason else entry.event.kind
        yield Fact(clock_text(wall_ns), value, event_link(history.with_wall_time(entry)))


class _ColdBlocks(NamedTuple):
    text: str
    coldest: int
    coldest_share: float


def _cold_blocks(mirror: Mirror, number: int) -> _ColdBlocks | None:
    table = mirror.requests.blocks(number).astype(np.int64)
    units = mirror.ledger.attention[table]
    measured = np.flatnonzero(units)
    if not measured.size:
        return None
    shares = attention_shares(units[measured])
    is_cold = shares < _COLD_SHARE / measured.size
    coldest = int(shares.argmin())
    text = (
        f"{count(int(is_cold.sum()))} of {plural(measured.size, 'block')} get less than a tenth of an even "
        f"share; together {percent(float(shares[is_cold].sum()))} of the attention"
    )
    return _ColdBlocks(text, int(table[measured[coldest]]), float(shares[coldest]))
