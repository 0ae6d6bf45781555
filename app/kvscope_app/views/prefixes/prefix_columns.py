"""Columns of the prefix table: cell texts and sort keys. Must not depend on widgets."""

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

_TIER_LABELS: Final = tuple(TIER_STYLES[tier].short_name for tier in BLOCK_TIERS)


Ints = npt.NDArray[np.int64]
Cell = Callable[["PrefixMoment", int], str]


class PrefixMoment:
    """Prefix tree at a time, with the data that table cells need: times of steps and sizes of nodes."""

    def __init__(
        self, tree: PrefixTree, cache: CacheInfo, times: StepTimes, now_ns: int, capabilities: Capabilities = OWN_ENGINE
    ) -> None:
        self.tree = tree
        self.capabilities = capabilities
        self.cache = cache
        self.num_tokens: Ints = tree.num_blocks * cache.block_size
        self.num_bytes: Ints = tree.num_in_tier.sum(axis=1) * cache.block_bytes
        """Bytes of each node, shape (nodes,). Blocks stored in two tiers count twice."""
        self.update_time(times, now_ns)

    def update_time(self, times: StepTimes, now_ns: int) -> None:
        """Set the shown time and the known times of steps. The tree stays the same."""
        self.now_ns = now_ns
        self.first_ns = times.first_ns
        self.used_ns: Ints = times.times_of(self.tree.last_used_step)
        """Time of each node's last use in ns, shape (nodes,); `UNKNOWN` if before `first_ns`."""

    def idle_s(self, node: int) -> int:
        """Return the seconds since the node was last used, or 0 while a request holds it.

        If the last use was before the first known step (`is_before_all`), this is a lower bound.
        """
        used_ns = self.first_ns if self.is_before_all(node) else int(self.used_ns[node])
        return 0 if self.tree.holders[node] else max(self.now_ns - used_ns, 0) // 1_000_000_000

    def is_before_all(self, node: int) -> bool:
        return int(self.used_ns[node]) == UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixColumn(TableColumn[[PrefixMoment, int]]):
    """Column of the prefix table. `plain` returns a cell's text for copying to a spreadsheet."""

    plain: Cell
    sort_by: Callable[[PrefixMoment], Ints]


def node_text(tree: PrefixTree, node: int, cache: CacheInfo) -> str:
    """Return a text for a node without known text: `#4 · 32 tokens from 64` if request 4 wrote it."""
    if not tree.num_blocks[node]:
        return "lost its beginning"
    owner, num_before = int(tree.owner[node]), int(tree.num_before[node])
    owner_text = f"#{owner} · " if owner > 0 else ""
    tokens = plural(int(tree.num_blocks[node]) * cache.block_size, "token")
    start_text = (
        "" if num_before < 0 else f" from {count(num_before * cache.block_size)}" if num_before else " from the start"
    )
    return f"{owner_text}{tokens}{start_text}" + (", lost its beginning" if tree.is_cut[node] else "")


def tiers_text(tree: PrefixTree, node: int) -> str:
    """Return the tiers that store the node's blocks: `memory`, or `memory 12, host 3`."""
    present = [(tier, int(number)) for tier, number in enumerate(tree.num_in_tier[node].tolist()) if number]
    if len(present) == 1:
        return _TIER_LABELS[present[0][0]]
    return ", ".join(f"{_TIER_LABELS[tier]} {count(number)}" for tier, number in present) or NOTHING


def holders_text(holders: int) -> str:
    return "idle" if not holders else "1 request" if holders == 1 else f"shared by {count(holders)}"


def idle_text(moment: PrefixMoment, node: int) -> str:
    """Return the time since the last use: `now`, `12 s`, `3 min`, `2 h 5 min`, or the lower bound `over 12 s`."""
    seconds = moment.idle_s(node)
    if moment.tree.holders[node]:
        return "now"
    if moment.is_before_all(node):
        return f"over {_duration_text(seconds)}" if seconds else "unknown"
    return _duration_text(seconds) if seconds else "now"


def _duration_text(seconds: int) -> str:
    minutes, hours = seconds // 60, seconds // 3600
    if not minutes:
        return f"{seconds} s"
    if not hours:
        return f"{minutes} min" if minutes >= 10 or not seconds % 60 else f"{minutes} min {seconds % 60} s"
    return f"{count(hours)} h {minutes % 60} min" if minutes % 60 else f"{count(hours)} h"


def _number_column(
    title: str,
    tip: str,
    sample: str,
    values: Callable[[PrefixMoment], Ints],
    format_value: Callable[[int], str] | None = None,
) -> PrefixColumn:
    format_cell = format_value or (lambda value: count(value) if value else NOTHING)
    return PrefixColumn(
        title,
        lambda moment, node: format_cell(int(values(moment)[node])),
        tip,
        True,
        sample,
        plain=lambda moment, node: str(int(values(moment)[node])),
        sort_by=values,
    )


def _text_column(
    title: str, tip: str, sample: str, format_cell: Cell, sort_by: Callable[[PrefixMoment], Ints]
) -> PrefixColumn:
    return PrefixColumn(title, format_cell, tip, False, sample, plain=format_cell, sort_by=sort_by)


def _only_if_reported(capability: str, column: PrefixColumn) -> PrefixColumn:
    def or_unknown(cell: Cell, instead: str) -> Cell:
        return lambda moment, node: cell(moment, node) if getattr(moment.capabilities, capability) else instead

    return replace(column, text=or_unknown(column.text, NOTHING), plain=or_unknown(column.plain, ""))


COLUMNS: Final = (
    _text_column(
        "Prefix",
        "Text up to where prompts diverge. Right expands, Left collapses",
        "",
        lambda m, n: node_text(m.tree, n, m.cache),
        lambda m: np.arange(len(m.tree)),
    ),
    _number_column("Subtree blocks", "Blocks of this row and its subtree", "00 000", lambda m: m.tree.num_with_all),
    _number_column("Blocks", "Blocks of this row", "00 000", lambda m: m.tree.num_blocks),
    _number_column("Tokens", "Tokens of this row", "000 000", lambda m: m.num_tokens),
    _only_if_reported(
        "prefix_hits",
        _number_column("Hits", "Hits of its most used block", "00 000", lambda m: m.tree.hits),
    ),
    _only_if_reported(
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
    _only_if_reported(
        "ref_counts",
        _number_column(
            "Held by",
            "Requests that hold its most shared block; idle prefixes may be evicted",
            "00 requests",
            lambda m: m.tree.holders,
            holders_text,
        ),
    ),
    _text_column(
        "Where",
        "Tiers that hold its blocks",
        "memory 000, host 00",
        lambda m, n: tiers_text(m.tree, n),
        lambda m: m.tree.num_in_tier @ np.arange(len(_TIER_LABELS)),
    ),
    _number_column("Size", "Bytes of keys and values, all tiers", "00.0 MiB", lambda m: m.num_bytes, num_bytes),
)
PREFIX: Final = 0
WITH_BELOW: Final = 1
IDLE: Final = next(place for place, column in enumerate(COLUMNS) if column.title == "Idle")
