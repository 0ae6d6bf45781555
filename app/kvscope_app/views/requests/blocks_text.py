"""Texts about the blocks that a request holds, read from a mirror. Imports no Qt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.ui.number_text import count, num_bytes, plural
from kvscope_app.views.block_locations import is_swapped_out, tier_counts_text
from kvscope_telemetry.messages.telemetry import CacheInfo
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.prefixes.request_blocks import blocks_of_request

_MAX_NAMED: Final = 6


def blocks_sentence(mirror: Mirror, number: int) -> str:
    """Return one sentence on the blocks that a request holds: their number, tier, size and fill. For an ended request,
    it has the number of its blocks that are still cached.
    """
    assert mirror.hello is not None, "a request is shown only once there is an engine"
    cache = mirror.hello.cache
    ledger_rows = mirror.requests.blocks(number).astype(np.int64)
    is_state = ledger_rows >= cache.first_state  # slots of recurrent states are the last rows of the ledger
    block_rows, states_text = ledger_rows[~is_state], _states_text(cache, ledger_rows[is_state])
    num_blocks = block_rows.size
    if not num_blocks:
        return f"Request #{count(number)} holds no blocks now.{_cached_sentence(mirror, cache, number)}"
    size_text = f", {num_bytes(num_blocks * cache.block_bytes)}" if cache.block_bytes else ""
    size_text += states_text
    num_tokens = int(mirror.ledger.filled[block_rows].astype(np.int64).sum())
    block_sizes = np.array(cache.block_sizes)
    # An external engine may report a group that its hello does not declare. It counts as the last group.
    groups = np.minimum(mirror.ledger.group[block_rows], block_sizes.size - 1)
    num_slots = int(block_sizes[groups].sum())
    slots_text = f"{count(num_tokens)} of {count(num_slots)} slots filled"
    name = f"Request #{count(number)}"
    lower_tiers_text = tier_counts_text(cache.rows_by_tier.count(block_rows))
    if not lower_tiers_text:
        return f"{name}: {plural(num_blocks, 'block')}{size_text}, {slots_text}"
    if is_swapped_out(mirror, number):
        return f"{name} is swapped out: {lower_tiers_text}{size_text}, {slots_text}"
    return f"{name}: {plural(num_blocks, 'block')} ({lower_tiers_text}){size_text}, {slots_text}"


def batch_sentence(mirror: Mirror, numbers: Sequence[int]) -> str:
    """Return text on the number of blocks that the selected requests hold together. A shared block counts once."""
    names = ", ".join(f"#{count(number)}" for number in numbers[:_MAX_NAMED])
    names += f" and {count(len(numbers) - _MAX_NAMED)} more" if len(numbers) > _MAX_NAMED else ""
    num_blocks = np.unique(np.concatenate([mirror.requests.blocks(number) for number in numbers])).size
    selected = f"{plural(len(numbers), 'request')} selected: {names}, {plural(num_blocks, 'block')} together."
    return f"{selected} Select one to see its blocks."


def _cached_sentence(mirror: Mirror, cache: CacheInfo, number: int) -> str:
    """Return a sentence on the blocks of an ended request, including its reused prefix, that are still cached, or "" if
    none is.
    """
    rows = blocks_of_request(mirror, number)
    rows = rows[rows < cache.first_state]
    if not rows.size:
        return ""
    num_reused = int(np.count_nonzero(mirror.ledger.owner[rows] != number))
    reused = f", {count(num_reused)} of them reused" if num_reused else ""
    return f" {plural(rows.size, 'block')} {'is' if rows.size == 1 else 'are'} still cached{reused}."


def _states_text(cache: CacheInfo, rows: npt.NDArray[np.int64]) -> str:
    """Return text such as `, 1 recurrent state of 2.3 MiB`, or "" if the request has no recurrent states."""
    if not rows.size:
        return ""
    text = f", {plural(rows.size, 'recurrent state')}"
    return text + (f" of {num_bytes(rows.size * cache.state_bytes)}" if cache.state_bytes else "")
