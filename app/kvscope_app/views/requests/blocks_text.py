"""Which blocks a request holds, in a sentence. Reads a mirror; knows no Qt."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvscope_app.look.number_text import count, num_bytes, plural
from kvscope_app.views.places import is_swapped_out, num_by_tier, places_text
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.telemetry import CacheInfo
from kvscope_telemetry.state.mirror import Mirror


def blocks_sentence(mirror: Mirror, number: int) -> str:
    """How many, where they are, and how much of them is used; of one that ended, what it left in the cache."""
    assert mirror.hello is not None, "a request is shown only once there is an engine"
    cache, rows = mirror.hello.cache, mirror.requests.blocks(number).astype(np.int64)
    ids = rows[rows < cache.first_state]
    num_blocks, state = ids.size, _state_words(cache, rows[rows >= cache.first_state])
    if not num_blocks:
        pool = mirror.ledger.part(0, cache.first_state)
        left = int(np.count_nonzero((pool.owner == number) & (pool.state == BlockState.CACHED)))
        cached = f" {plural(left, 'block')} {'is' if left == 1 else 'are'} still cached." if left else ""
        return f"Request #{count(number)} holds no blocks now.{cached}"
    size = f", {num_bytes(num_blocks * cache.block_bytes)}" if cache.block_bytes else ""
    size += state
    num_tokens = int(mirror.ledger.filled[ids].astype(np.int64).sum())
    sizes = np.array(cache.block_sizes)
    num_slots = int(sizes[np.minimum(mirror.ledger.group[ids], sizes.size - 1)].sum())
    slots = f"{count(num_tokens)} of {count(num_slots)} slots filled"
    name = f"Request #{count(number)}"
    lower = places_text(num_by_tier(cache, ids))
    if not lower:
        return f"{name}: {plural(num_blocks, 'block')}{size}, {slots}"
    if is_swapped_out(mirror, number):
        return f"{name} is swapped out: {lower}{size}, {slots}"
    return f"{name}: {plural(num_blocks, 'block')} ({lower}){size}, {slots}"


def _state_words(cache: CacheInfo, rows: npt.NDArray[np.int64]) -> str:
    """`, 1 recurrent state of 2.3 MiB`, where it has any."""
    if not rows.size:
        return ""
    words = f", {plural(rows.size, 'recurrent state')}"
    return words + (f" of {num_bytes(rows.size * cache.state_bytes)}" if cache.state_bytes else "")
