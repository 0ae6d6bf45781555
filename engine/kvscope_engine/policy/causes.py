"""Events in words that a person understands: what happened to a request, and why."""

from __future__ import annotations

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages import Event


def admitted(request: Request, now_ns: int, num_hit_blocks: int, num_blocks: int, block_size: int) -> Event:
    """The request got its place; `num_blocks` blocks for all it knows, `num_hit_blocks` of them cached."""
    returns = request.num_preemptions > 0
    cached = num_hit_blocks * block_size
    waited = "came back after a preemption" if returns else f"waited {_ms(now_ns - request.arrival_ns)}"
    saved = f"{cached} of {request.num_tokens} tokens were in the prefix cache"
    return Event(
        kind="resumed" if returns else "admitted",
        time_ns=now_ns,
        number=request.number,
        cause=f"{waited}; {_blocks(num_blocks)} needed, {num_hit_blocks} of them there already; {saved}",
        num_blocks=num_blocks,
        num_tokens=cached,
    )


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


def preempted(victim: Request, needy: Request, needed: int, available: int, now_ns: int) -> Event:
    """`needy` needed blocks that were not there. Called while the victim still has its own."""
    lost, held = victim.num_computed_tokens, len(victim.block_table)
    there = "none could be had" if available == 0 else f"{available} could be had"
    chosen = "it is itself the newest and gave way" if victim is needy else _choice(victim, needy)
    return Event(
        kind="preempted",
        time_ns=now_ns,
        number=victim.number,
        other=needy.number,
        cause=(
            f"request {needy.number} needed {_blocks(needed)} and {there}; {chosen};"
            f" {lost} tokens in {_blocks(held)} to recompute"
        ),
        num_blocks=held,
        num_tokens=lost,
    )


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


def evicted(count: int, needy: int, now_ns: int) -> Event:
    """Cached blocks were given away in a step, the first of them to request `needy`."""
    verb = "was" if count == 1 else "were"
    cause = f"no block was free; {count} cached, unused for longest, {verb} evicted, first for request {needy}"
    return Event(kind="evicted", time_ns=now_ns, other=needy, cause=cause, num_blocks=count)


def cache_reset(count: int, now_ns: int) -> Event:
    """The prefix cache was emptied."""
    cause = f"the prefix cache was reset; {_blocks(count)} freed"
    return Event(kind="note", time_ns=now_ns, cause=cause, num_blocks=count)


def _choice(victim: Request, needy: Request) -> str:
    if victim.priority < needy.priority:
        return f"request {victim.number} was chosen for its low priority ({victim.priority})"
    return f"request {victim.number} was chosen as the newest"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
