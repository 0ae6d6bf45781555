"""State of the blocks of one chat turn, for its cache strip and its comparison with another version. Imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.ui.number_text import UNKNOWN, count, plural
from kvscope_app.views.capability_messages import why_no_requests
from kvscope_app.views.console.block_chains import BlockChains, Hashes, HashIndex, num_equal_blocks, tree_group
from kvscope_app.views.console.conversation import AnswerStats
from kvscope_telemetry.ledger import BlockState, Ledger, Tier
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.mirror.mirror import Mirror


class TurnBlockState(IntEnum):
    """State of a turn's block at the shown time. Where blocks share a pixel, the highest value is shown."""

    UNKNOWN = 0
    IN_USE = 1
    SHARED = 2
    """In use by several requests."""
    CACHED = 3
    HOST = 4
    DISK = 5
    RELEASED = 6
    """Dropped without having been evicted, because only full blocks are cached, and only if prefix caching is on."""
    EVICTED = 7


STATE_TEXTS: Final = {
    TurnBlockState.UNKNOWN: "unknown",
    TurnBlockState.IN_USE: "in use",
    TurnBlockState.SHARED: "shared",
    TurnBlockState.CACHED: "cached",
    TurnBlockState.HOST: "in host memory",
    TurnBlockState.DISK: "on disk",
    TurnBlockState.RELEASED: "released",
    TurnBlockState.EVICTED: "evicted",
}
_LOWER_STATES: Final = {Tier.HOST: TurnBlockState.HOST, Tier.DISK: TurnBlockState.DISK}


@dataclass(frozen=True, slots=True, eq=False)
class TurnBlocks:
    """Blocks of a turn's request in the order of its text, n of them. If there are none, `reason` says why."""

    states: npt.NDArray[np.uint8]
    """`TurnBlockState` of each block, shape (n,)."""
    rows: npt.NDArray[np.int64]
    """Ledger row of each block, -1 if it is in no tier, shape (n,)."""
    block_size: int = 1
    num_reused: int | None = None
    """Number of leading blocks that the request found in the cache at its admission; None if unknown."""
    num_earlier: int = 0
    """Number of leading blocks that the previous turn has, too. The blocks after them are this turn's own."""
    reason: str = ""

    @property
    def summary(self) -> str:
        """Line such as `14 blocks, 10 reused · 12 cached, 2 evicted`."""
        num_blocks = self.states.size
        if not num_blocks:
            return self.reason
        reused = "" if self.num_reused is None else f", {count(self.num_reused)} reused"
        counts = ((state, int(np.count_nonzero(self.states == state))) for state in TurnBlockState)
        parts = [f"{count(number)} {STATE_TEXTS[state]}" for state, number in counts if number]
        return f"{plural(num_blocks, 'block')}{reused}  ·  {', '.join(parts)}"

    def describe(self, index: int) -> str:
        """Return a line about the block at `index`, such as `Block 3 of 14, tokens 32 to 47: reused, cached now`."""
        first = index * self.block_size
        origin = UNKNOWN if self.num_reused is None else "reused" if index < self.num_reused else "computed"
        whose = ", also in the previous turn" if index < self.num_earlier else ""
        tokens = f"tokens {count(first)} to {count(first + self.block_size - 1)}"
        state = STATE_TEXTS[TurnBlockState(int(self.states[index]))]
        return f"Block {count(index + 1)} of {count(self.states.size)}, {tokens}: {origin}{whose}; now {state}"

    @property
    def own_rows(self) -> npt.NDArray[np.uint32]:
        """Ledger rows of this turn's own blocks, or of all its blocks if none of its own is in a tier."""
        own = self.rows[self.num_earlier :]
        own = own[own >= 0]
        rows = own if own.size else self.rows[self.rows >= 0]
        return rows.astype(np.uint32)

    def equals(self, other: TurnBlocks) -> bool:
        return (
            (self.block_size, self.num_reused, self.num_earlier, self.reason)
            == (other.block_size, other.num_reused, other.num_earlier, other.reason)
            and np.array_equal(self.states, other.states)
            and np.array_equal(self.rows, other.rows)
        )


def no_blocks(reason: str) -> TurnBlocks:
    return TurnBlocks(np.empty(0, np.uint8), np.empty(0, np.int64), reason=reason)


def why_unknown(mirror: Mirror, stats: AnswerStats, *, is_recorded: bool = False) -> str:
    """Return why the blocks of an answer's request are unknown in `mirror`, or "" if they may be known.

    `is_recorded`: their hashes are known, and `mirror` is the current state, which need not have the request then.
    """
    if mirror.hello is None:
        return "Blocks are unknown: no engine is connected"
    if missing := why_no_requests(mirror.capabilities):
        return f"Blocks are unknown: {missing}"
    if not stats.number:
        return "Blocks are unknown: the engine has not reported this request"
    if stats.epoch != mirror.epoch:
        return "Blocks are unknown: the engine was restarted since"
    if not is_recorded and mirror.requests.row_of(stats.number) is None:
        return "Blocks are unknown: the engine state shown does not include this request"
    return ""


def turn_blocks(
    mirror: Mirror,
    stats: AnswerStats,
    chains: BlockChains,
    index: HashIndex,
    previous: AnswerStats | None,
    *,
    is_live: bool = False,
) -> TurnBlocks:
    """Return the blocks of an answer's request in `mirror`.

    Args:
        mirror: The state to show, which may be a past one.
        stats: Statistics of the answer.
        chains: Recorded hashes.
        index: Rows in `mirror` of at least the hashes recorded for the answer.
        previous: Statistics of the previous answer, None if there is none.
        is_live: Whether `mirror` is the current state.
    """
    row, hashes = mirror.requests.row_of(stats.number), chains.get(stats.epoch, stats.number)
    reason = why_unknown(mirror, stats, is_recorded=is_live and hashes is not None)
    if reason or mirror.hello is None:
        return no_blocks(reason)
    group = tree_group(mirror.hello.cache)
    earlier = chains.get(previous.epoch, previous.number) if previous is not None else None
    if row is None:
        assert hashes is not None, "otherwise, there is a reason"
        return _blocks_without_request(mirror, stats, index, hashes, num_equal_blocks(hashes, earlier))
    block_size = mirror.hello.cache.block_sizes[group]
    table = mirror.requests.table(stats.number, group)
    if table.size:
        rows = np.where(table >= mirror.requests.num_reserved, table, -1).astype(np.int64)
        states = _states_of_rows(mirror.ledger, rows, TurnBlockState.RELEASED)
    elif hashes is not None:
        num_computed = int(mirror.requests.num_computed_tokens[row])
        rows, states = _blocks_by_hash(mirror, index, hashes, num_computed, block_size)
    elif mirror.requests.state[row] != RequestState.FINISHED:
        return no_blocks("It has no blocks yet")
    else:
        return no_blocks("Blocks are unknown: they were not observed before the request ended")
    was_admitted = mirror.requests.state[row] != RequestState.WAITING
    num_reused = int(mirror.requests.num_cached_tokens[row]) // block_size
    return TurnBlocks(
        states=states,
        rows=rows,
        block_size=block_size,
        num_reused=min(num_reused, rows.size) if was_admitted and mirror.hello.cache.prefix_caching else None,
        num_earlier=min(num_equal_blocks(hashes, earlier), rows.size),
    )


def _blocks_without_request(
    mirror: Mirror, stats: AnswerStats, index: HashIndex, hashes: Hashes, num_earlier: int
) -> TurnBlocks:
    """Return the blocks of a request that has ended and is not in `mirror`, because it ended before the desktop was
    connected.
    """
    assert mirror.hello is not None, "a request is known only once there is an engine"
    block_size = mirror.hello.cache.block_sizes[tree_group(mirror.hello.cache)]
    num_computed = max(stats.context_tokens - 1, 0)  # the last token was generated and not computed
    rows, states = _blocks_by_hash(mirror, index, hashes, num_computed, block_size)
    num_reused = min(stats.num_cached_tokens // block_size, rows.size) if mirror.hello.cache.prefix_caching else None
    return TurnBlocks(
        states=states,
        rows=rows,
        block_size=block_size,
        num_reused=num_reused,
        num_earlier=min(num_earlier, rows.size),
    )


def _states_of_rows(
    ledger: Ledger, rows: npt.NDArray[np.int64], state_without_row: TurnBlockState
) -> npt.NDArray[np.uint8]:
    states = np.full(rows.size, state_without_row, np.uint8)
    has_row = rows >= 0
    held = rows[has_row]
    found = np.where(ledger.state[held] == BlockState.CACHED, TurnBlockState.CACHED, TurnBlockState.IN_USE)
    found[(found == TurnBlockState.IN_USE) & (ledger.ref_count[held] > 1)] = TurnBlockState.SHARED
    for tier, state in _LOWER_STATES.items():
        found[ledger.tier[held] == tier] = state
    states[has_row] = found
    return states


def _blocks_by_hash(
    mirror: Mirror, index: HashIndex, hashes: Hashes, num_computed: int, block_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return the row and the state of each block of a request that holds no blocks.

    `num_computed` is the number of tokens whose KV was computed.
    """
    assert mirror.hello is not None, "a request is known only once there is an engine"
    num_blocks = max(hashes.size, -(-num_computed // block_size))
    hashes = np.concatenate([hashes, np.zeros(num_blocks - hashes.size, np.uint64)])
    rows = index.rows_of(hashes)
    states = _states_of_rows(mirror.ledger, rows, TurnBlockState.EVICTED)
    is_cacheable = mirror.hello.cache.prefix_caching & ((np.arange(num_blocks) + 1) * block_size <= num_computed)
    states[hashes == 0] = np.where(is_cacheable, TurnBlockState.UNKNOWN, TurnBlockState.RELEASED)[hashes == 0]
    return rows, states
