"""Texts on why requests wait or were refused, derived from a mirror and events. Imports no Qt.

Reasons reported by the engine have precedence. All other reasons follow the rules of kvscope's own engine: requests are
scheduled by priority, then arrival; 1 % of the pool is reserved unless nothing runs; some allocators allocate runs of a
power of two. The cached part of a prompt is unknown until the request is admitted.
"""

from __future__ import annotations

import numpy as np

from kvscope_app.session.event_log import EventLog
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import count, plural
from kvscope_app.views.events.event_entries import why_text
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.mirror.mirror import Mirror

_WAITING_STATES = (RequestState.WAITING, RequestState.PREEMPTED)
_RUN_ALLOCATORS = ("contiguous", "buddy", "oracle")
"""Allocators that allocate one contiguous run of blocks per request, whose length is a power of two."""
_MAX_REFUSED = 1000
_REASONS: dict[int, str] = {
    WaitsFor.GRAMMAR: "the grammar of its answer is being compiled",
    WaitsFor.REMOTE_KV: "its KV is being loaded from elsewhere, into blocks that it holds",
    WaitsFor.ADAPTER: "its LoRA adapter needs a slot, and all slots are in use",
    WaitsFor.INPUT: "waiting for the rest of its prompt",
    WaitsFor.PROMPT: "its prompt is being computed for another completion, whose blocks it will share",
}
"""Texts for waiting reasons that do not follow from the numbers of blocks and running requests, by `WaitsFor`."""


def why_waits(mirror: Mirror, number: int) -> str:
    """Return why a request waits, or "" if it does not.

    For example `4 requests are ahead of it; it needs up to 12 blocks, 1 free and 2 idle in the cache`.
    """
    row = mirror.requests.row_of(number)
    if row is None or mirror.hello is None or mirror.requests.state[row] not in _WAITING_STATES:
        return ""
    ahead = num_ahead(mirror, row)
    parts = [f"{plural(ahead, 'request')} {'is' if ahead == 1 else 'are'} ahead of it"] if ahead else []
    requests, cache = mirror.requests, mirror.hello.cache
    waits_for = int(requests.waits_for[row])
    max_running = mirror.limits[0] or cache.max_num_seqs
    max_tokens = mirror.limits[1] or cache.max_num_batched_tokens
    budget_text = f" (at most {plural(max_tokens, 'token')} a step)" if max_tokens else ""
    if waits_for == WaitsFor.BUDGET:
        return "; ".join([f"other requests use up the step's token budget{budget_text}", *parts])
    if waits_for in _REASONS:
        return "; ".join([_REASONS[waits_for], *parts])
    num_running = int(np.count_nonzero(requests.state == RequestState.RUNNING))
    is_full = 0 < max_running <= num_running
    if is_full:
        parts.append(f"{plural(num_running, 'request')} {'runs' if num_running == 1 else 'run'}, the maximum")
    num_needed, needed_text = _needed_blocks(mirror, row)
    num_free, num_cached = mirror.num_available_blocks, mirror.num_cached
    has_watermark = num_running and cache.allocator == "paged" and mirror.capabilities.engine == OWN_ENGINE.engine
    num_reserved = max(1, cache.num_blocks // 100) if has_watermark else 0
    available_text = f"{count(num_free)} free" + (f" and {count(num_cached)} idle in the cache" if num_cached else "")
    parts.append(f"it needs {needed_text}, {available_text}")
    is_short = num_needed + num_reserved > num_free + num_cached
    if not is_short and cache.num_states and waits_for == WaitsFor.BLOCKS:
        parts.append("it needs a slot for its recurrent state as well")
    elif not (ahead or is_full or is_short or cache.allocator in _RUN_ALLOCATORS):
        parts.append(f"it starts in the next step that has tokens left and needs no preemption{budget_text}")
    if num_reserved and is_short:
        verb = "is" if num_reserved == 1 else "are"
        parts.append(f"{plural(num_reserved, 'block')} {verb} reserved for running requests")
    return "; ".join(parts)


def _needed_blocks(mirror: Mirror, row: int) -> tuple[int, str]:
    assert mirror.hello is not None, "there is an engine"
    requests, cache = mirror.requests, mirror.hello.cache
    output = int(requests.num_output_tokens[row])
    tokens = int(requests.num_prompt_tokens[row]) + output
    if cache.allocator not in _RUN_ALLOCATORS:
        needed = sum(-(-tokens // size) for size in cache.block_sizes)
        return needed, f"up to {plural(needed, 'block')}"
    if cache.allocator == "contiguous":
        tokens = mirror.hello.model.max_model_len
    elif cache.allocator == "buddy":
        tokens += _power_of_two(max(output, 1)) - output
    needed = _power_of_two(-(-tokens // cache.block_size))
    return needed, f"{plural(needed, 'block')} in a row"


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def num_ahead(mirror: Mirror, row: int) -> int:
    """Return the number of waiting requests that are scheduled before the request in row `row` of `mirror.requests`."""
    requests = mirror.requests
    is_waiting = np.isin(requests.state, _WAITING_STATES)
    sort_keys = [-requests.priority.astype(np.int64), requests.arrival_ns, requests.number]
    is_before, is_same = np.zeros(len(requests), np.bool_), np.ones(len(requests), np.bool_)
    for values in sort_keys:
        is_before |= is_same & (values < values[row])
        is_same &= values == values[row]
    return int(np.count_nonzero(is_waiting & is_before))


def first_waiting(mirror: Mirror) -> int | None:
    """Return the number of the waiting request that is scheduled next, or None if none waits."""
    requests = mirror.requests
    rows = np.flatnonzero(np.isin(requests.state, _WAITING_STATES))
    if not rows.size:
        return None
    order = np.lexsort((requests.number[rows], requests.arrival_ns[rows], -requests.priority[rows].astype(np.int64)))
    return int(requests.number[rows[order[0]]])


def queue_text(mirror: Mirror, log: EventLog, wall_ns: int) -> str:
    """Return one line on waiting and refused requests, or "" if there are none.

    The line has the reasons of the first waiting and of the most recently refused request. `wall_ns` is the offset in
    ns from the log's times to the wall clock.
    """
    parts = []
    first = first_waiting(mirror)
    if first is not None:
        num_waiting = int(np.count_nonzero(np.isin(mirror.requests.state, _WAITING_STATES)))
        waiting_text = f"{count(num_waiting)} waiting" if num_waiting > 1 else "1 waiting"
        parts.append(f"{waiting_text}. #{count(first)} is next: {why_waits(mirror, first)}.")
    refused = log.of_kinds({"refused"}, _MAX_REFUSED)
    if refused:
        last = refused[-1]
        request_text = f"#{count(last.event.number)} " if last.event.number else ""
        refusals = "1 was refused" if len(refused) == 1 else f"{count(len(refused))} were refused, the last"
        parts.append(f"{refusals} at {clock_text(last.time_ns + wall_ns)[:8]}: {request_text}{why_text(last.event)}")
    return "  ".join(parts)
