"""Predicts whether the engine would refuse a pin because an unfinished request would no longer fit.

The rule is the engine's (`kvscope_telemetry.pins`). It needs to know which cached blocks match the start of a waiting
request's text. Where that is unknown here, the pin is offered and the engine decides. Imports no widgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import numpy as np

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import KVGroup
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.pins import MAX_PINNED, max_held_blocks, num_missing, refusal_for_request, refusal_of_many

_ONE_GROUP = (KVGroup(kind="full"),)


def why_pins_refused(mirror: Mirror, blocks: Iterable[int], *, with_prefix: bool = False) -> str:
    """Return why the engine would refuse to pin `blocks` of the prefix cache, or "" if it may accept them."""
    assert mirror.hello is not None, "a mirror with blocks has a hello"
    cache, requests = mirror.hello.cache, mirror.requests
    requested = _with_prefixes(mirror, blocks) if with_prefix else set(blocks)
    pinned = mirror.pinned | requested
    if len(pinned) > MAX_PINNED:
        return refusal_of_many(len(requested))
    groups = tuple(group for group in cache.groups if group.kind != "state") or _ONE_GROUP
    num_usable = cache.num_blocks - cache.num_reserved_blocks
    lengths = requests.num_prompt_tokens + requests.max_tokens
    rows = np.flatnonzero(requests.state != RequestState.FINISHED)
    for row in rows[np.argsort(-lengths[rows], kind="stable")].tolist():
        needed = sum(
            max_held_blocks(
                int(lengths[row]),
                window=group.window,
                max_chunk=cache.max_num_batched_tokens,
                block_size=cache.block_size,
            )
            for group in groups
        )
        fits = num_missing(num_needed=needed, num_own=0, num_usable=num_usable, num_pinned=len(pinned)) <= 0
        if fits:  # then all shorter requests fit, too
            return ""
        num_own = _max_own_blocks(mirror, row, groups, pinned)
        if num_missing(num_needed=needed, num_own=num_own, num_usable=num_usable, num_pinned=len(pinned)) > 0:
            reason = refusal_for_request(
                int(requests.number[row]), num_needed=needed, num_usable=num_usable, num_pinned=len(pinned)
            )
            return reason[:1].upper() + reason[1:]
    return ""


def _max_own_blocks(mirror: Mirror, row: int, groups: tuple[KVGroup, ...], pinned: Set[int]) -> int:
    """Return how many of the `pinned` blocks hold the start of the text of the request in `row`.

    If that is unknown, returns an upper bound.
    """
    assert mirror.hello is not None, "a mirror with blocks has a hello"
    requests, hashes = mirror.requests, mirror.ledger.hash
    num_tokens = int(requests.num_prompt_tokens[row] + requests.num_output_tokens[row])
    num_full = max(0, num_tokens - 1) // mirror.hello.cache.block_size
    num_own = 0
    for index, group in enumerate(groups):
        if group.window:  # the rule counts no blocks of a sliding-window group, which frees blocks
            continue
        table = requests.table(int(requests.number[row]), index).tolist()
        if requests.state[row] != RequestState.RUNNING:
            table = []
        # A full block without a hash has the text of another block, which may be pinned.
        end = next((i for i, block in enumerate(table) if block not in pinned and hashes[block]), len(table))
        num_own += num_full if end == len(table) else min(end, num_full)
    return min(num_own, len(pinned))


def _with_prefixes(mirror: Mirror, blocks: Iterable[int]) -> set[int]:
    """Return `blocks` and the cached blocks of their prefixes. All are blocks of the pool."""
    hashes, parents = (column[: mirror.num_blocks] for column in (mirror.ledger.hash, mirror.ledger.parent))
    hashed = np.flatnonzero(hashes)
    block_of = dict(zip(hashes[hashed].tolist(), hashed.tolist(), strict=True))
    result = set[int]()
    for block in blocks:
        ancestor: int | None = block
        while ancestor is not None and ancestor not in result:
            result.add(ancestor)
            ancestor = block_of.get(int(parents[ancestor]))
    return result
