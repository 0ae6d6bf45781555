"""KV groups: layers that read the same earlier tokens, and what of a request's text they therefore need.

A request has a block table in each group, all of one length. Where a group's layers look back at most so far, blocks
that no later token reads are let go of: their places in the table are `NULL_BLOCK`. Knows neither layers nor tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvscope_telemetry import pins

NULL_BLOCK: Final = 0
"""In a block table: what was here was let go of. A pool with windows gives this block to nobody."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Which earlier tokens the layers of a group read."""

    window: int = 0
    """Tokens that a query reads at most, itself among them; 0: all before it."""
    is_chunked: bool = False
    """The text is cut into windows, and a query reads none before its own (Llama 4)."""

    def first_read(self, position: int) -> int:
        """The first position that the token at `position` reads; those after it read none before that."""
        if not self.window:
            return 0
        return position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)

    def num_unread(self, num_tokens: int, block_size: int) -> int:
        """Blocks from the first that no token reads which follows the first `num_tokens`."""
        return self.first_read(num_tokens) // block_size

    def most_held(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Blocks that a request of `num_tokens` tokens holds at most at a time, computed `max_chunk` at a time."""
        return pins.most_held(num_tokens, window=self.window, max_chunk=max_chunk, block_size=block_size)


ONE_GROUP: Final = (GroupRule(),)
"""All layers read everything."""


def group_digest(digest: bytes, group: int) -> bytes:
    """What a prefix is found by in a group: each holds and loses blocks of a text by itself."""
    return digest + bytes((group,)) if group else digest


class PrefixMatch(NamedTuple):
    """The longest cached prefix of a text for which all groups have what the next token reads."""

    num_places: int
    tables: tuple[list[int], ...] = ()
    """What is at each place, one list a group; `NULL_BLOCK` where the next token does not read."""
    num_let_go: tuple[int, ...] = ()
    """Places of each group, from the first, that are not needed."""


NOTHING: Final = PrefixMatch(0)


def find_prefix(
    groups: Sequence[GroupRule], digests: Sequence[bytes], block_size: int, get: Callable[[bytes], int | None]
) -> PrefixMatch:
    """The longest beginning of a text, whose full blocks have `digests`, after which the text can go on.

    `get` says where a block of a group is, by its `group_digest`.
    """
    found: list[list[int]] = []
    num_places = len(digests)
    for group, rule in enumerate(groups):
        blocks: list[int] = []
        if not rule.window:
            for digest in digests[:num_places]:
                block = get(group_digest(digest, group))
                if block is None:
                    break
                blocks.append(block)
            num_places = len(blocks)
        found.append(blocks)
    windows = [(group, rule) for group, rule in enumerate(groups) if rule.window]
    before = -1
    while windows and num_places != before:  # what is too long for one may be too long for another when it is cut
        before = num_places
        for group, rule in windows:
            num_places = _longest_end(rule, group, digests[:num_places], block_size, get)
    if not num_places:
        return NOTHING
    let_go = tuple(rule.num_unread(num_places * block_size, block_size) for rule in groups)
    for group, _ in windows:
        needed = [get(group_digest(digest, group)) for digest in digests[let_go[group] : num_places]]
        found[group] = [NULL_BLOCK] * let_go[group] + [block for block in needed if block is not None]
    return PrefixMatch(num_places, tuple(blocks[:num_places] for blocks in found), let_go)


def _longest_end(
    rule: GroupRule, group: int, digests: Sequence[bytes], block_size: int, get: Callable[[bytes], int | None]
) -> int:
    """Of the first blocks of a text, how many at most, so that the group has all that is read after them."""
    end = place = len(digests)
    while place > rule.num_unread(end * block_size, block_size):
        place -= 1
        if get(group_digest(digests[place], group)) is None:
            end = place
    return end
