"""Columns of the prefix table: cell texts and sort keys. Depends on trees only, not on widgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.ui.number_text import NOTHING, count, num_bytes, plural
from kvscope_app.views.prefixes.step_times import UNKNOWN, StepTimes
from kvscope_app.views.table import TableColumn
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.telemetry import CacheInfo
from kvscope_telemetry.prefixes.tree import PrefixTree
from kvscope_telemetry.tier_rows import BLOCK_TIERS

_TIER_LABELS: Final = tuple(TIER_STYLES[tier].word for tier in BLOCK_TIERS)


Ints = npt.NDArray[np.int64]
Cell = Callable[["PrefixMoment", int], str]


class PrefixMoment:
    """Data of the cells: a tree with its time, the times of its steps, and the block sizes."""

    def __init__(
        self, tree: PrefixTree, cache: CacheInfo, times: StepTimes, now_ns: int, capabilities: Capabilities = OWN_ENGINE
    ) -> None:
        self.tree = tree
        self.capabilities = capabilities
        self.cache = cache
        self.num_tokens: Ints = tree.num_blocks * cache.block_size
        self.num_bytes: Ints = tree.num_in_tier.sum(axis=1) * cache.block_bytes
        """Bytes of all rows, shape (nodes,); blocks present in two tiers count twice."""
        self.update_time(times, now_ns)

    def update_time(self, times: StepTimes, now_ns: int) -> None:
        """Update the time shown and the known times of steps for an unchanged tree."""
        self.now_ns = now_ns
        """Moment shown, by the wall clock in ns."""
        self.first_ns = times.first_ns
        self.used_ns: Ints = times.times_of(self.tree.last_used_step)
        """Time of each node's last use in ns, shape (nodes,); `UNKNOWN` if before `first_ns`."""

    def idle_s(self, node: int) -> int:
        """Return the whole seconds since last use; a lower bound if `is_before_all`."""
        used_ns = self.first_ns if self.is_before_all(node) else int(self.used_ns[node])
        return 0 if self.tree.holders[node] else max(self.now_ns - used_ns, 0) // 1_000_000_000

    def is_before_all(self, node: int) -> bool:
        """Whether the last use was before the first known time."""
        return int(self.used_ns[node]) == UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixColumn(TableColumn[[PrefixMoment, int]]):
    """Column with a displayed text and a `plain` one for spreadsheets."""

    plain: Cell
    sort_by: Callable[[PrefixMoment], Ints]


def node_text(tree: PrefixTree, node: int, cache: CacheInfo) -> str:
    """Describe a node whose text is unknown, such as `#4 - 32 tokens from 64` if request 4 wrote it."""
    if not tree.num_blocks[node]:
        return "lost its beginning"
    owner, before = int(tree.owner[node]), int(tree.num_before[node])
    who = f"#{owner} · " if owner > 0 else ""
    tokens = plural(int(tree.num_blocks[node]) * cache.block_size, "token")
    where = "" if before < 0 else f" from {count(before * cache.block_size)}" if before else " from the start"
    return f"{who}{tokens}{where}" + (", lost its beginning" if tree.is_cut[node] else "")


def tiers_text(tree: PrefixTree, node: int) -> str:
    """Return the tiers that hold the node's blocks, such as `memory` or `memory 12, host 3`."""
    there = [(tier, int(number)) for tier, number in enumerate(tree.num_in_tier[node].tolist()) if number]
    if len(there) == 1:
        return _TIER_LABELS[there[0][0]]
    return ", ".join(f"{_TIER_LABELS[tier]} {count(number)}" for tier, number in there) or NOTHING


def holders_text(holders: int) -> str:
    return "idle" if not holders else "1 request" if holders == 1 else f"shared by {count(holders)}"


def idle_text(moment: PrefixMoment, node: int) -> str:
    """Return text on the time since last use, such as `now`, `12 s`, `3 min`, `2 h 5 min` or `over 12 s`."""
    seconds = moment.idle_s(node)
    if moment.tree.holders[node]:
        return "now"
    if moment.is_before_all(node):
        return f"over {_long(seconds)}" if seconds else "unknown"
    return _long(seconds) if seconds else "now"


def _long(seconds: int) -> str:
    minutes, hours = seconds // 60, seconds // 3600
    if not minutes:
        return f"{seconds} s"
    if not hours:
        return f"{minutes} min" if minutes >= 10 or not seconds % 60 else f"{minutes} min {seconds % 60} s"
    return f"{count(hours)} h {minutes % 60} min" if minutes % 60 else f"{count(hours)} h"


def _number(
    title: str, tip: str, sample: str, values: Callable[[PrefixMoment], Ints], words: Callable[[int], str] | None = None
) -> PrefixColumn:
    """Return a column of whole numbers. `words` formats a value; without it, 0 is shown as a dash."""
    made = words or (lambda value: count(value) if value else NOTHING)
    return PrefixColumn(
        title,
        lambda moment, node: made(int(values(moment)[node])),
        tip,
        True,
        sample,
        plain=lambda moment, node: str(int(values(moment)[node])),
        sort_by=values,
    )


def _text(title: str, tip: str, sample: str, words: Cell, sort_by: Callable[[PrefixMoment], Ints]) -> PrefixColumn:
    return PrefixColumn(title, words, tip, False, sample, plain=words, sort_by=sort_by)


def _if_known(capability: str, column: PrefixColumn) -> PrefixColumn:
    """Return the column, empty instead of 0 if the engine does not report `capability`."""

    def known(cell: Cell, instead: str) -> Cell:
        return lambda moment, node: cell(moment, node) if getattr(moment.capabilities, capability) else instead

    return replace(column, text=known(column.text, NOTHING), plain=known(column.plain, ""))


COLUMNS: Final = (
    _text(
        "Prefix",
        "Text up to where prompts diverge. Right expands, Left collapses",
        "",
        lambda m, n: node_text(m.tree, n, m.cache),
        lambda m: np.arange(len(m.tree)),
    ),
    _number("Subtree blocks", "Blocks of this row and its subtree", "00 000", lambda m: m.tree.num_with_all),
    _number("Blocks", "Blocks of this row", "00 000", lambda m: m.tree.num_blocks),
    _number("Tokens", "Tokens of this row", "000 000", lambda m: m.num_tokens),
    _if_known(
        "prefix_hits",
        _number("Hits", "Hits of its most used block", "00 000", lambda m: m.tree.hits),
    ),
    _if_known(
        "last_used",
        PrefixColumn(
            "Idle",
            idle_text,
            "Time since last use",
            True,
            "over 00 min",
            plain=lambda m, n: str(m.idle_s(n)),
            sort_by=lambda m: np.where(m.tree.holders > 0, -(1 << 40), -m.tree.last_used_step),
        ),
    ),
    _if_known(
        "ref_counts",
        _number(
            "Held by",
            "Requests that hold its most shared block; idle prefixes may be evicted",
            "00 requests",
            lambda m: m.tree.holders,
            holders_text,
        ),
    ),
    _text(
        "Where",
        "Tiers that hold its blocks",
        "memory 000, host 00",
        lambda m, n: tiers_text(m.tree, n),
        lambda m: m.tree.num_in_tier @ np.arange(len(_TIER_LABELS)),
    ),
    _number("Size", "Bytes of keys and values, all tiers", "00.0 MiB", lambda m: m.num_bytes, num_bytes),
)
PREFIX: Final = 0
WITH_BELOW: Final = 1
IDLE: Final = next(place for place, column in enumerate(COLUMNS) if column.title == "Idle")
