"""KV groups: sets of layers that read the same earlier tokens, and therefore need the same blocks of a request's KV.

A request has a block table in each group, all of the same length. In a group whose layers have a limited window, blocks
that no later token reads are freed: their entries in the table become `NULL_BLOCK`. Independent of layers and tensors.
See docs/internals/decisions/0020-kv-groups-share-one-pool.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvscope_telemetry import pins

NULL_BLOCK: Final = 0
"""Block-table entry in place of a block that was freed. A pool with windows never allocates this block."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Determines which earlier tokens the layers of a KV group read."""

    window: int = 0
    """Maximum number of tokens that a query reads, including its own token; 0 for all earlier tokens."""
    is_chunked: bool = False
    """Whether the text is divided into chunks of `window` tokens, and a query reads only tokens of its chunk
    (Llama 4).
    """

    def first_read(self, position: int) -> int:
        """Return the first position that the token at `position` reads. No later token reads an earlier position."""
        if not self.window:
            return 0
        return position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)

    def num_unread(self, num_tokens: int, block_size: int) -> int:
        """Return the number of leading blocks that the token after the first `num_tokens` tokens, and all later
        ones, do not read.
        """
        return self.first_read(num_tokens) // block_size

    def max_held_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Return the maximum number of blocks that a request of `num_tokens` tokens holds if it is computed in chunks
        of `max_chunk` tokens.
        """
        return pins.max_held_blocks(num_tokens, window=self.window, max_chunk=max_chunk, block_size=block_size)


ONE_GROUP: Final = (GroupRule(),)
"""A single group whose layers read all earlier tokens."""


def group_digest(digest: bytes, group: int) -> bytes:
    """Return the key of a prefix in a KV group.

    Keys differ between groups, because each group caches and evicts the blocks of a text independently.
    """
    return digest + bytes((group,)) if group else digest


class PrefixMatch(NamedTuple):
    """Longest cached prefix of a text for which all KV groups have the blocks that the next token reads."""

    num_blocks: int
    tables: tuple[list[int], ...] = ()
    """Blocks of the prefix, one list per KV group, with `NULL_BLOCK` in place of blocks that the next token
    does not read.
    """
    num_null_blocks: tuple[int, ...] = ()
    """Number of leading `NULL_BLOCK` entries of each group's table."""


NO_PREFIX: Final = PrefixMatch(0)


def find_prefix(
    groups: Sequence[GroupRule], digests: Sequence[bytes], block_size: int, get: Callable[[bytes], int | None]
) -> PrefixMatch:
    """Return the longest cached prefix after which the computation of a text can continue.

    `digests` are those of the text's full blocks. `get` returns the cached block for a `group_digest`, or None if no
    block is cached.
    """
    group_blocks: list[list[int]] = []
    num_blocks = len(digests)
    for group, rule in enumerate(groups):
        blocks: list[int] = []
        if not rule.window:
            for digest in digests[:num_blocks]:
                block = get(group_digest(digest, group))
                if block is None:
                    break
                blocks.append(block)
            num_blocks = len(blocks)
        group_blocks.append(blocks)
    windows = [(group, rule) for group, rule in enumerate(groups) if rule.window]
    previous_num_blocks = -1
    while (
        windows and num_blocks != previous_num_blocks
    ):  # a prefix shortened for one group may then be incomplete in another
        previous_num_blocks = num_blocks
        for group, rule in windows:
            num_blocks = _longest_end(rule, group, digests[:num_blocks], block_size, get)
    if not num_blocks:
        return NO_PREFIX
    num_null = tuple(rule.num_unread(num_blocks * block_size, block_size) for rule in groups)
    for group, _ in windows:
        needed = [get(group_digest(digest, group)) for digest in digests[num_null[group] : num_blocks]]
        group_blocks[group] = [NULL_BLOCK] * num_null[group] + [block for block in needed if block is not None]
    return PrefixMatch(num_blocks, tuple(blocks[:num_blocks] for blocks in group_blocks), num_null)


def _longest_end(
    rule: GroupRule, group: int, digests: Sequence[bytes], block_size: int, get: Callable[[bytes], int | None]
) -> int:
    """Return the largest number of leading blocks after which the group has all blocks that the next token reads."""
    end = index = len(digests)
    while index > rule.num_unread(end * block_size, block_size):
        index -= 1
        if get(group_digest(digests[index], group)) is None:
            end = index
    return end
