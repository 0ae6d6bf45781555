"""The columns of the prefix table: how a cell reads, and what it is sorted by. Knows a tree and no Qt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.look.number_text import NOTHING, count, num_bytes, plural
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.telemetry import CacheInfo
from kvscope_telemetry.prefixes.tree import PrefixTree

_TIER_WORDS: Final = {Tier.HBM: "memory", Tier.HOST: "host", Tier.DISK: "disk"}


Ints = npt.NDArray[np.int64]
Cell = Callable[["Moment", int], str]


class Moment:
    """What cells are made of: a tree, when it was so, and the sizes of blocks."""

    def __init__(self, tree: PrefixTree, step: int, cache: CacheInfo) -> None:
        self.tree = tree
        self.step = step
        self.cache = cache
        self.num_tokens: Ints = tree.num_blocks * cache.block_size
        self.num_bytes: Ints = tree.num_in_tier.sum(axis=1) * cache.block_bytes
        """Of all rows: what is in two tiers takes room in both."""
        self.idle: Ints = np.maximum(step - tree.last_used_step, 0)


@dataclass(frozen=True, slots=True)
class Column:
    """Text is for the eyes, `plain` for a spreadsheet."""

    title: str
    tip: str
    sample: str
    """The widest text it is made for."""
    text: Cell
    plain: Cell
    sort_by: Callable[[Moment], Ints]
    is_number: bool = True


def node_words(tree: PrefixTree, node: int, cache: CacheInfo) -> str:
    """What there is to say of a node whose text is not known: `#4 · 32 tokens from 64`, 4 being who wrote it."""
    if not tree.num_blocks[node]:
        return "beginning evicted"
    owner, before = int(tree.owner[node]), int(tree.num_before[node])
    who = f"#{owner} · " if owner > 0 else ""
    tokens = plural(int(tree.num_blocks[node]) * cache.block_size, "token")
    where = "" if before < 0 else f" from {count(before * cache.block_size)}" if before else " from the start"
    return f"{who}{tokens}{where}" + (", beginning evicted" if tree.is_cut[node] else "")


def where_words(tree: PrefixTree, node: int) -> str:
    """`memory`, `memory 12, host 3`."""
    there = [(tier, int(number)) for tier, number in enumerate(tree.num_in_tier[node].tolist()) if number]
    if len(there) == 1:
        return _TIER_WORDS[Tier(there[0][0])]
    return ", ".join(f"{_TIER_WORDS[Tier(tier)]} {count(number)}" for tier, number in there) or NOTHING


def holder_words(holders: int) -> str:
    """By how many requests."""
    return "idle" if not holders else "1 request" if holders == 1 else f"{count(holders)} share"


def idle_words(idle: int) -> str:
    """How long ago it was used."""
    return "now" if idle == 0 else plural(idle, "step")


def _number(
    title: str, tip: str, sample: str, values: Callable[[Moment], Ints], words: Callable[[int], str] | None = None
) -> Column:
    """A column of whole numbers; `words` make one readable, and without them nothing is a dash."""
    made = words or (lambda value: count(value) if value else NOTHING)
    return Column(
        title,
        tip,
        sample,
        text=lambda moment, node: made(int(values(moment)[node])),
        plain=lambda moment, node: str(int(values(moment)[node])),
        sort_by=values,
    )


def _text(title: str, tip: str, sample: str, words: Cell, sort_by: Callable[[Moment], Ints]) -> Column:
    return Column(title, tip, sample, words, words, sort_by, is_number=False)


COLUMNS: Final = (
    _text(
        "Prefix",
        "Text, one row until texts part: Right opens it, Left closes it",
        "",
        lambda m, n: node_words(m.tree, n, m.cache),
        lambda m: np.arange(len(m.tree)),
    ),
    _number("With below", "Blocks of this row and of all below it", "00 000", lambda m: m.tree.num_with_all),
    _number("Blocks", "Blocks of this row, each once", "00 000", lambda m: m.tree.num_blocks),
    _number("Tokens", "Tokens of this row", "000 000", lambda m: m.num_tokens),
    _number("Hits", "How often a prompt found its most wanted block", "00 000", lambda m: m.tree.hits),
    _number("Idle", "Steps since it was used last", "00 000 steps", lambda m: m.idle, idle_words),
    _number(
        "Held by",
        "Requests that hold its most held block; what is idle may be evicted",
        "00 requests",
        lambda m: m.tree.holders,
        holder_words,
    ),
    _text(
        "Where",
        "Tiers that have its blocks",
        "memory 000, host 00",
        lambda m, n: where_words(m.tree, n),
        lambda m: m.tree.num_in_tier[:, Tier.HOST] + 2 * m.tree.num_in_tier[:, Tier.DISK],
    ),
    _number("Size", "Of its keys and values, in all tiers together", "00.0 MiB", lambda m: m.num_bytes, num_bytes),
)
PREFIX: Final = 0
WITH_BELOW: Final = 1
