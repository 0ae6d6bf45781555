"""Events in words that a person understands: what happened to a request, and why."""

from __future__ import annotations

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.preemption import GivenUp
from kvscope_engine.policy.scheduling.reuse import Reusable
from kvscope_telemetry.messages.telemetry import Event


def admitted(request: Request, now_ns: int, found: Reusable, num_reused: int, num_blocks: int, missed: str) -> Event:
    """The request got its place: `num_blocks` blocks for all it knows, `num_reused` tokens of it not to be computed.

    `found` is what there seemed to be, `missed` why it was not more.
    """
    returns = request.num_preemptions > 0
    since_ns = request.preempted_ns if returns else request.arrival_ns
    waited = (
        f"came back {_time(now_ns - since_ns)} after its preemption"
        if returns
        else f"waited {_time(now_ns - since_ns)}"
    )
    parts = [waited, f"{_blocks(num_blocks)} needed", *_reused(request, found, num_reused)]
    if missed:
        parts.append(f"not more, since {missed}")
    return Event(
        kind="resumed" if returns else "admitted",
        time_ns=now_ns,
        number=request.number,
        cause="; ".join(parts),
        num_blocks=num_blocks,
        num_tokens=num_reused,
    )


def _reused(request: Request, found: Reusable, num_reused: int) -> list[str]:
    if not found.sources:
        return [f"all {request.num_tokens} tokens to compute"]
    loaded = len(found.sources) - len(found.hits)
    parts = [f"{num_reused} of {request.num_tokens} tokens were there already, {_blocks(len(found.hits))} in the pool"]
    if loaded:
        parts.append(f"{_blocks(loaded)} came back from lower tiers")
    if num_reused < found.num_tokens:
        parts.append(f"{found.num_tokens - num_reused} tokens could not be read back whole and are computed again")
    return parts


def forked(parent: Request, child: Request, now_ns: int) -> Event:
    """The child runs on its parent's blocks."""
    shared = len(child.block_table)
    return Event(
        kind="admitted",
        time_ns=now_ns,
        number=child.number,
        other=parent.number,
        cause=f"forked from request {parent.number}; shares its {_blocks(shared)} until one of them writes",
        num_blocks=shared,
        num_tokens=child.num_computed_tokens,
    )


def preempted(victim: Request, needy: Request, needed: int, available: int, given_up: GivenUp, now_ns: int) -> Event:
    """`needy` needed blocks that were not there, and the victim gave up its own."""
    there = "none could be had" if available == 0 else f"{available} could be had"
    chosen = "it is itself next to give way" if victim is needy else _choice(victim, needy)
    return Event(
        kind="preempted",
        time_ns=now_ns,
        number=victim.number,
        other=needy.number,
        cause=f"request {needy.number} needed {_blocks(needed)} and {there}; {chosen}; {_price(given_up)}",
        num_blocks=given_up.num_blocks,
        num_tokens=given_up.num_tokens,
    )


def _price(given_up: GivenUp) -> str:
    """What was lost or moved, and what it costs as far as that was measured."""
    what = f"{given_up.num_tokens} tokens in {_blocks(given_up.num_blocks)}"
    swap, recompute = _about(given_up.swap_seconds), _about(given_up.recompute_seconds)
    if given_up.is_swapped:
        against = f", {recompute} to compute again" if recompute else ""
        return f"{what} moved to a lower tier ({swap} there and back{against})"
    parts = [part for part in (recompute, f"{swap} by a lower tier" if swap else "") if part]
    return f"{what} to recompute" + (f" ({', '.join(parts)})" if parts else "")


def _about(seconds: float | None) -> str:
    return "" if seconds is None else f"about {seconds * 1e3:.1f} ms"


def finished(request: Request, now_ns: int, num_blocks: int) -> Event:
    """The request ended by itself. `num_blocks` were released."""
    reasons = {
        "stop": "reached its stop condition",
        "length": f"reached its limit of {request.max_tokens} new tokens",
        "error": "ended by an error",
    }
    what = reasons.get(str(request.finish_reason), str(request.finish_reason))
    return Event(
        kind="finished",
        time_ns=now_ns,
        number=request.number,
        cause=f"{what} after {len(request.output_token_ids)} tokens; {_blocks(num_blocks)} released",
        num_blocks=num_blocks,
        num_tokens=len(request.output_token_ids),
    )


def aborted(request: Request, now_ns: int, num_blocks: int, cause: str) -> Event:
    """The request was stopped from outside. `num_blocks` were released."""
    generated = len(request.output_token_ids)
    return Event(
        kind="aborted",
        time_ns=now_ns,
        number=request.number,
        cause=f"{cause}; {generated} tokens were generated, {_blocks(num_blocks)} released",
        num_blocks=num_blocks,
        num_tokens=generated,
    )


def refused(number: int, now_ns: int, cause: str) -> Event:
    """A request was not taken; `number` is 0 when it did not get one."""
    return Event(kind="refused", time_ns=now_ns, number=number, cause=cause)


def evicted(count: int, num_sunk: int, needy: int, now_ns: int) -> Event:
    """Cached blocks were given away in a step, the first to request `needy`; `num_sunk` went to a lower tier."""
    verb = "was" if count == 1 else "were"
    cause = f"no block was free; {count} cached, unused for longest, {verb} evicted, first for request {needy}"
    if num_sunk:
        cause += f"; {num_sunk} went to host memory"
    return Event(kind="evicted", time_ns=now_ns, other=needy, cause=cause, num_blocks=count)


def disk_failed(reason: str, now_ns: int) -> Event:
    """The disk tier is not written any more."""
    return Event(kind="note", time_ns=now_ns, cause=f"the disk tier is off from now on: {reason}")


def cache_reset(count: int, now_ns: int) -> Event:
    """The prefix cache was emptied."""
    cause = f"the prefix cache was reset; {_blocks(count)} freed"
    return Event(kind="note", time_ns=now_ns, cause=cause, num_blocks=count)


def _choice(victim: Request, needy: Request) -> str:
    if victim.priority < needy.priority:
        return f"request {victim.number} was chosen for its low priority ({victim.priority})"
    if victim.num_preemptions < needy.num_preemptions:
        return f"request {victim.number} was chosen: it was {_times(victim.num_preemptions)} preempted"
    return f"request {victim.number} was chosen as the newest"


def _times(count: int) -> str:
    """Fewer times than who needed its blocks."""
    return {0: "never", 1: "only once"}.get(count, f"only {count} times")


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _time(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.1f} s" if duration_ns >= 1_000_000_000 else f"{duration_ns / 1e6:.1f} ms"
